"""One table of functions and one of policies; every composition is tested over both."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from remat import checkpoint_name, checkpoint_policy, remat
from remat.policies import (
    offload_matmuls,
    offload_names,
    save_attention,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_unbatched_matmuls,
)

aten = torch.ops.aten
# For what torch itself does otherwise in some versions.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

POLICIES = {
    "nothing": save_nothing,
    "everything": save_everything,
    "matmuls": save_matmuls,
    "unbatched": save_unbatched_matmuls,
    "attention": save_attention,
    "ops": save_ops(aten.sin, aten.tanh, aten.exp, aten.native_dropout),
    "rule": checkpoint_policy(lambda info: info.index % 2 == 0),
    "names": save_names("hidden"),
    "offload": offload_matmuls | offload_names("hidden"),
    "algebra": (save_matmuls | save_attention) & ~save_ops(aten.bmm),
}
FEW = ("nothing", "matmuls", "rule")

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Build = Callable[[Wrap], tuple[Callable[..., Any], tuple[Tensor, ...]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that holds a region, and its arguments.

    `build(wrap)` gives a function of tensors that calls `wrap(region)` and returns tensors, and arguments.
    `lacks` names the compositions that torch refuses without remat.
    """

    build: Build
    lacks: frozenset[str]


CASES: dict[str, Case] = {}


def case(*, lacks: str = "") -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        CASES[build.__name__] = Case(build, frozenset(lacks.split()))
        return build

    return add


def matrix(
    *compositions: str, policies: tuple[str, ...] = tuple(POLICIES), without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Run a test for every function that torch can put through `compositions`, times `policies`."""
    names = [n for n, c in CASES.items() if not c.lacks.intersection(compositions) and n not in without]
    return pytest.mark.parametrize(
        ("name", "policy"), [pytest.param(n, p, id=f"{n}-{p}") for n in names for p in policies]
    )


Run = Callable[[Callable[..., Any], tuple[Tensor, ...]], tuple[Any, Any]]


def check(name: str, policy: str, run: Run, order: int = 1) -> None:
    """`run(fn, args) -> (values, derivatives)` with remat equals the same without: values bitwise.

    At second order without remat, what the two passes give to one cast of a weight adds up in bfloat16; with
    remat each pass has its own cast and float32 adds up. So there bfloat16's precision is the bound.
    """
    build = CASES[name].build
    with warnings.catch_warnings():
        # Of torch, and of a name that most functions of the table do not give.
        for text in (
            "There is a performance drop because",
            "Attempted to insert a get_attr Node",
            ".*hidden",
        ):
            warnings.filterwarnings("ignore", message=text)
        torch.manual_seed(0)
        values, derivatives = run(*build(lambda fn: fn))
        torch.manual_seed(0)
        got_values, got_derivatives = run(*build(lambda fn: remat(fn, policy=POLICIES[policy])))
    same(got_values, values, 0.0)
    if order > 1 and "autocast" in name:
        largest = max(float(t.detach().abs().max()) for t in pytree.tree_leaves(derivatives))
        got_derivatives, derivatives = pytree.tree_map(lambda t: t / largest, (got_derivatives, derivatives))
        same(got_derivatives, derivatives, 2e-2)
    else:
        same(got_derivatives, derivatives, 1e-10)


def same(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
    )


def scalar(outputs: Any) -> Tensor:
    """A real loss that reads every inexact output with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            squared = (out * out.conj()).real if out.is_complex() else out * out
            total = total + (i + 1) * squared.double().sum() + (i + 2) * out.real.double().sum()
    return total


def gradients(outputs: Any, leaves: list[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    """Derivatives of `scalar(outputs)` for those of `leaves` that require grad, by plain autograd."""
    options.setdefault("allow_unused", True)
    return torch.autograd.grad(scalar(outputs), [x for x in leaves if x.requires_grad], **options)


def loss_of(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: scalar(fn(*args))


def leaves_of(args: tuple[Tensor, ...]) -> list[Tensor]:
    """Fresh leaves that require grad where that is possible."""
    return [a.detach().clone().requires_grad_(a.is_floating_point() or a.is_complex()) for a in args]


def inexact(args: Any) -> tuple[int, ...]:
    """Positions of the arguments that have derivatives."""
    return tuple(i for i, a in enumerate(args) if a.is_floating_point() or a.is_complex())


def vjp(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any]]:
    """torch.func.vjp, whose annotation says that it may return three values."""
    return torch.func.vjp(fn, *args)  # type: ignore[return-value]


def jvp(fn: Callable[..., Any], primals: Any, directions: Any) -> tuple[Any, Any]:
    """torch.func.jvp, likewise."""
    return torch.func.jvp(fn, primals, directions)  # type: ignore[return-value]


def tangents(args: Any) -> tuple[Tensor, ...]:
    return tuple(torch.ones_like(a) * (i + 1) / 4 for i, a in enumerate(args))


def of_inexact(
    fn: Callable[..., Any], args: tuple[Tensor, ...]
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """`fn` as a function of its inexact arguments alone, for transforms that have no argnums."""
    positions = inexact(args)

    def partial(*new: Tensor) -> Any:
        full = list(args)
        for i, value in zip(positions, new, strict=True):
            full[i] = value
        return fn(*full)

    return partial, tuple(args[i] for i in positions)


def batched(args: tuple[Tensor, ...], size: int = 2) -> tuple[Tensor, ...]:
    """Every argument stacked `size` times, the copies different where the dtype allows."""
    return tuple(
        torch.stack(
            [a * (1 + 0.25 * i) if a.is_floating_point() or a.is_complex() else a for i in range(size)]
        )
        for a in args
    )


class OpCounter(TorchDispatchMode):
    """Counts the ops that run below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    @property
    def dots(self) -> int:
        return sum(self.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"))


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made since it was entered that are still alive: no cycle may hold one."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {ref.cdata for ref, _ in self.made if not ref.expired()}
        known |= {
            t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.made.append((StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()))
        return out

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self.made if not ref.expired())


def loop(body: Callable[..., Any], carry: Any, xs: Tensor, reverse: bool = False) -> Any:
    """What `scan_remat` computes, step by step."""
    ys = []
    for x in xs.flip(0) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, torch.stack(ys[::-1] if reverse else ys)


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers that depend on the shape and the seed alone, never on the global generator."""
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


# -- the table ----------------------------------------------------------------------------------------


@case()
def mlp(wrap):
    def block(params, x):
        h = checkpoint_name(F.gelu(F.linear(F.layer_norm(x, (4,)), params["w1"], params["b1"])), "hidden")
        return x + F.linear(h, params["w2"])

    def fn(x, w1, b1, w2):
        return wrap(block)({"w1": w1, "b1": b1, "w2": w2}, x)

    return fn, (rand(3, 4), rand(6, 4), rand(6), rand(4, 6))


@case()
def deep(wrap):
    def fn(x, *weights):
        for w in weights:
            x = x + wrap(lambda x, w: torch.sin(checkpoint_name(torch.tanh(x), "hidden") @ w))(x, w)
        return x

    return fn, (rand(2, 3), rand(3, 3), rand(3, 3, seed=1), rand(3, 3, seed=2))


@case(lacks="second jvp hessian")
def attention_fused(wrap):
    def block(x, w):
        q, k, v = (x @ w).view(1, 3, 2, 12).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 8) + x

    return lambda x, w: wrap(block)(x, w), (rand(3, 8), rand(8, 24))


@case()
def attention_by_hand(wrap):
    def block(x, wq, wk, wv):
        q, k, v = (torch.einsum("btd,dhe->bthe", x, w) for w in (wq, wk, wv))
        scores = torch.einsum("bthe,bshe->bhts", q, k) / 2
        scores = checkpoint_name(scores.softmax(-1), "hidden")
        return torch.einsum("bhts,bshe->bthe", scores, v).flatten(-2).tanh()

    args = (rand(2, 3, 4), rand(4, 2, 2), rand(4, 2, 2, seed=1), rand(4, 2, 2, seed=2))
    return lambda *args: wrap(block)(*args), args


@case()
def conv_batch_norm(wrap):
    mean, var = rand(3), rand(3, seed=1).exp()

    def block(x, w, b, scale, shift):
        return F.softplus(F.batch_norm(F.conv2d(x, w, b, padding=1), mean, var, scale, shift, training=False))

    args = (rand(1, 2, 3, 3), rand(3, 2, 3, 3), rand(3), rand(3, seed=2), rand(3, seed=3))
    return lambda *args: wrap(block)(*args), args


@case(lacks="hessian")
def dropout(wrap):
    def block(x, w):
        h = F.dropout(torch.tanh(x @ w), 0.5)
        return F.dropout(h * torch.rand_like(h), 0.25) @ w

    return lambda x, w: wrap(block)(x, w), (rand(3, 4), rand(4, 4))


@case()
def tied_weights(wrap):
    def fn(x, w):
        embed, project = wrap(lambda x, w: torch.tanh(x @ w)), wrap(lambda x, w: torch.sin(x @ w.t()))
        return project(embed(x, w), w)

    return fn, (rand(3, 4), rand(4, 2))


@case(lacks="grad_jvp")
def views_and_in_place(wrap):
    def block(x, y):
        h = x.clone()
        h[0].mul_(2)
        h.view(-1).add_(1).sin_()
        h.t()[1].copy_(y[:, 0])
        return h.narrow(0, 0, 2).exp(), h.relu_()

    return lambda x, y: wrap(block)(x, y), (rand(3, 2), rand(3, 2, seed=1))


@case()
def many_outputs(wrap):
    def block(x, unused, flag):
        h = torch.sin(x)
        return h, {
            "twice": (h, h * 2),
            "text": "kept",
            "none": None,
            "number": 3,
            "index": h.argmax(),
            "flag": flag,
        }

    def fn(x, unused):
        h, rest = wrap(block)(x, unused, True)
        assert (
            rest["text"] == "kept" and rest["none"] is None and rest["number"] == 3 and rest["flag"] is True
        )
        return h, rest["twice"][0], rest["twice"][1], rest["index"].double()

    return fn, (rand(3), rand(2))


@case()
def inputs_returned(wrap):
    def fn(x, y):
        a, b, c = wrap(lambda x, y: (x, torch.exp(x * y), y.view(-1)))(x, y)
        return a * b, c

    return fn, (rand(2, 2), rand(2, 2, seed=1))


@case(lacks="grad_jvp")
def results_in_one_memory(wrap):
    def block(x, w):
        h = torch.tanh(x) @ w + 1
        return h, h.view(-1), h[1], h.t(), h

    def fn(x, w):
        h, flat, row, turned, again = wrap(block)(x, w)
        h.mul_(2)
        row.sin_()
        return flat.exp(), turned @ x, again

    return fn, (rand(3, 2), rand(2, 2, seed=1))


@case(lacks="grad_jvp")
def results_in_parts_of_one_memory(wrap):
    def block(x, w):
        h = x @ w + 1
        with torch.no_grad():
            seen = h.view(-1)
        return *h.chunk(2), h.detach(), h, seen, h.real

    def fn(x, w):
        top, bottom, fixed, h, seen, real = wrap(block)(x, w)
        return top.sin() * bottom, fixed * h, seen * h.view(-1), real.exp()

    return fn, (rand(4, 2), rand(2, 2, seed=1))


@case()
def keyword_arguments(wrap):
    def block(x, *rest, scale, shift=None, **more):
        out = torch.tanh(x * scale) @ more["w"]
        return out if shift is None else out + shift * len(rest)

    return lambda x, s, w: wrap(block)(x, 1, 2, scale=s, shift=x, w=w), (
        rand(2, 2),
        rand(2),
        rand(2, 2, seed=1),
    )


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class State:
    hidden: Tensor
    step: int


pytree.register_dataclass(State)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(Box, lambda b: ([b.value], None), lambda v, _: Box(*v))


@case()
def structures(wrap):
    def block(tree, state):
        h = torch.tanh(tree["w"].left @ tree["w"].right) * state.hidden
        return State(h, state.step + 1), Box([h.sin(), (tree["list"][0].value * 2,)])

    def fn(a, b, h):
        state, box = wrap(block)({"w": Pair(a, b), "list": [Box(a)]}, State(h, 1))
        assert isinstance(state, State) and state.step == 2 and isinstance(box, Box)
        return state.hidden, box.value

    return fn, (rand(2, 3), rand(3, 2), rand(2, 2))


@case()
def integers(wrap):
    def block(ids, table, w):
        h = F.embedding(ids, table)
        return torch.sigmoid(h @ w).gather(1, ids[:, None]), ids + 1

    return lambda ids, table, w: wrap(block)(ids, table, w)[0], (
        torch.tensor([0, 2, 1]),
        rand(3, 4),
        rand(4, 3),
    )


@case(lacks="hessian")
def zero_size(wrap):
    return lambda x, w: wrap(lambda x, w: torch.tanh(x @ w))(x, w), (rand(0, 3), rand(3, 2))


@case(lacks="jacobian hessian")
def complex_numbers(wrap):
    def block(z, w):
        h = torch.exp(z @ w * 0.5)
        return h, torch.view_as_real(h).sin(), h.abs()

    args = (rand(2, 2, dtype=torch.complex128), rand(2, 2, dtype=torch.complex128, seed=1))
    return lambda z, w: wrap(block)(z, w), args


# A weight used twice is cast once or twice as autocast's cache likes; its gradients add up in one precision
# or the other (test_backward.py looks at that). Here every weight is used once.
SINGLE = tuple(rand(*shape, dtype=torch.float32) for shape in ((3, 4), (4, 4), (2, 4)))


@case()
def autocast_inside(wrap):
    def block(x, w, w2):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(F.linear(torch.tanh(F.linear(x, w)), w2))

    return lambda *args: wrap(block)(*args), SINGLE


@case()
def autocast_around(wrap):
    def fn(x, w, w2):
        with torch.autocast("cpu", torch.bfloat16):
            h = wrap(lambda x, w, w2: torch.tanh(F.linear(torch.tanh(F.linear(x, w)), w2)))(x, w, w2)
        return h.float()

    return fn, SINGLE


@case()
def closure(wrap):
    def fn(x, w, b):
        weights = {"w": [w], "b": b * 2}
        return wrap(lambda x: torch.tanh(x @ weights["w"][0]) + weights["b"])(x)

    return fn, (rand(3, 4), rand(4, 4), rand(4))


class Block(torch.nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wrap(self.inner)(x)


@case()
def functional_call(wrap):
    inside, outside = Block(wrap), torch.nn.Linear(4, 4).double()

    def fn(x, w, b):
        h = torch.func.functional_call(inside, {"inner.0.weight": w, "inner.0.bias": b}, (x,))
        params = {"weight": w, "bias": b}
        return wrap(lambda p, x: torch.sin(torch.func.functional_call(outside, p, (x,))))(params, h)

    return fn, (rand(3, 4), rand(4, 4), rand(4))


@case()
def nested(wrap):
    def fn(x, w):
        inner = wrap(lambda x: torch.sin(x @ w))
        return wrap(lambda x, w: inner(torch.tanh(inner(x)) @ w))(x, w)

    return fn, (rand(2, 3), rand(3, 3))


@case()
def nested_linear(wrap):
    """Autograd saves a view of the weight, which the region inside does not hold itself."""

    def fn(x, w):
        inner = wrap(lambda x, w: torch.sin(F.linear(x.sin(), w)))
        return wrap(lambda x, w: inner(torch.tanh(inner(x, w)), w).cos())(x, w)

    return fn, (rand(2, 3), rand(3, 3))


@case()
def inner_transforms(wrap):
    def block(x, w):
        energy = lambda x, w: (torch.tanh(x @ w) ** 2).sum()  # noqa: E731
        return torch.func.grad(energy)(x, w) + torch.vmap(torch.sin)(x)

    return lambda x, w: wrap(block)(x, w), (rand(2, 3), rand(3, 3))
