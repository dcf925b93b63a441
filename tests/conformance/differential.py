"""A program as a region against itself without remat: values, gradients, second order, under torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from remat import RematError, remat
from tests.composition.table import POLICIES
from tests.conformance.torch_db import Program
from tests.helpers import FEW, forget, inexact, scalar

# One pass: how the function is run, and which derivatives come back.
Pass = Callable[[Callable[..., Any], list[Tensor]], Any]


def values(fn: Callable[..., Any], leaves: list[Tensor]) -> Any:
    """With gradients: what they are is compared, too, where there are any."""
    out = fn(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    loss = scalar(out)
    if not wanted or not loss.requires_grad:
        return out, None
    return out, torch.autograd.grad(loss, wanted, allow_unused=True)


def second_order(fn: Callable[..., Any], leaves: list[Tensor]) -> Any:
    wanted = [x for x in leaves if x.requires_grad]
    first = torch.autograd.grad(scalar(fn(*leaves)), wanted, create_graph=True, allow_unused=True)
    again = scalar([g for g in first if g is not None])
    return first, torch.autograd.grad(again, wanted, allow_unused=True) if again.requires_grad else None


def under_func(fn: Callable[..., Any], leaves: list[Tensor]) -> Any:
    args = tuple(x.detach() for x in leaves)
    return torch.func.grad(lambda *a: scalar(fn(*a)), argnums=inexact(args))(*args)


def under_func_twice(fn: Callable[..., Any], leaves: list[Tensor]) -> Any:
    return under_func(lambda *a: under_func(fn, list(a)), leaves)


class Verdict(NamedTuple):
    """`kind`: right, refused (a RematError), failed (another error), wrong, or "not in torch" itself."""

    program: str
    run: str
    kind: str
    text: str = ""


def _differs(got: Any, expected: Any, program: Program) -> str:
    """Nothing, or how they differ, to the last bits: a sum of gradients may be added up in another order."""
    got_leaves, expected_leaves = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(got_leaves) != len(expected_leaves):
        return f"{len(got_leaves)} results for {len(expected_leaves)}"
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        if not isinstance(b, Tensor):
            continue
        if not program.exact:
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
            continue
        a, b = (t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (a, b))
        try:
            torch.testing.assert_close(a, b, equal_nan=True, check_stride=False, **_bounds(b.dtype))
        except AssertionError as error:
            return str(error).replace("\n", " ")
    return ""


def _bounds(dtype: torch.dtype) -> dict[str, Any]:
    if not (dtype.is_floating_point or dtype.is_complex):
        return {"rtol": 0.0, "atol": 0.0}
    bound = torch.finfo(dtype).eps ** 0.75
    return {"rtol": bound, "atol": bound}


def _run(run: Pass, program: Program, wrap: Callable[..., Any]) -> list[Any]:
    """A first call and a second."""
    fn, leaves = program.build(wrap)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(run(fn, leaves))
    return found


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def compare(program: Program, few: tuple[str, ...] = FEW) -> list[Verdict]:
    """All passes of a program, a verdict for each and each policy."""
    passes: list[tuple[Pass, tuple[str, ...]]] = [(values, few), (under_func, ("rule",))]
    if program.twice:
        passes += [(second_order, ("nothing", "rule")), (under_func_twice, ("rule",))]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run, policies in passes:
            try:
                if run is not values and not any(x.requires_grad for x in program.build(_as_it_is)[1]):
                    continue
                expected = _run(run, program, _as_it_is)
            except Exception as error:
                found.append(Verdict(program.name, run.__name__, "not in torch", _short(error)))
                continue
            found += [_verdict(run, program, policy, expected) for policy in policies]
    return found


def _verdict(run: Pass, program: Program, policy: str, expected: list[Any]) -> Verdict:
    forget()
    name = f"{run.__name__}-{policy}"
    try:
        got = _run(run, program, lambda fn: remat(fn, policy=POLICIES[policy]))
    except RematError as error:
        return Verdict(program.name, name, "refused", _short(error))
    except Exception as error:
        # Torch asks whether a loss of eigenvectors is well defined, but not of wrappers of torch.func.
        # Regions that go backward below these are asked.
        kind = "not in torch" if "so it is ill-defined" in str(error) else "failed"
        return Verdict(program.name, name, kind, f"{type(error).__name__}: {_short(error)}")
    for turn, one, plain in zip(("first", "second"), got, expected, strict=True):
        if text := _differs(one, plain, program):
            return Verdict(program.name, name, "wrong", f"{turn} call: {text}")
    return Verdict(program.name, name, "right")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
