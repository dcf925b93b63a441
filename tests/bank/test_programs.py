"""Programs of the bank in some ways under some policies, pairwise; `make test-product` draws of all pairs."""

from __future__ import annotations

import re
import time
import zlib
from typing import Any

import pytest
import torch

from tests.bank import BANK, Program, expected, subject
from tests.bank.library import PLANNED, POLICIES
from tests.helpers import forget
from tests.ways import LAYOUTS, WAYS, check

READY = [name for name in POLICIES if name not in PLANNED]
# A call costs milliseconds in these; the others are differentiated more than once, or trace.
CHEAP = [name for name in WAYS if name in expected.CHEAP]
NAMES = list(BANK)
QUICK = 4


def drawn(name: str, count: int) -> list[tuple[str, str]]:
    """Ways and policies for one program: neighbours in the bank have others, so each pair of a tag with a way
    or a policy, and of a way with a policy, comes up."""
    at = NAMES.index(name)
    ways = [CHEAP[(at * 5 + k * 7) % len(CHEAP)] for k in range(count)]
    return [(way, READY[(at + k * 3) % len(READY)]) for k, way in enumerate(["backward", *ways[1:]])]


def number(*of: str) -> int:
    """The same for a program whatever others the bank has."""
    return zlib.crc32(" ".join(of).encode())


def holds(program: Program, way: str, policy: str, layout: str = "contiguous", **around: Any) -> None:
    """The pair goes as the bank expects: three calls in a row, and one without regions after them."""
    forget()
    verdict = check(subject(program, policy), program.steps(way, layout, **around), torch.float64)
    wanted = expected.of(program, way)
    # Torch refuses some layouts, as `view` does, and hooks around a transform; what is copied first it takes.
    if (layout != "contiguous" or around) and "invalid" in (verdict.kind, wanted.kind):
        return
    kinds = {"same", "memory"} if wanted.kind == "same" else set(wanted.kind.split())
    told = f"{program.name} {way} {policy} {layout} {around}"
    assert verdict.kind in kinds, f"{told}: {verdict}, expected {wanted}"
    assert re.search(wanted.says, verdict.what), (told, verdict.what)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_program_in_some_ways(name: str) -> None:
    for way, policy in dict.fromkeys([*drawn(name, QUICK), *BANK[name].found]):
        holds(BANK[name], way, policy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_program_on_another_layout(name: str) -> None:
    """A call with another memory format comes between two of the first."""
    layout = LAYOUTS[1 + NAMES.index(name) % (len(LAYOUTS) - 1)]
    # Under torch.func dropout of what is not contiguous draws another mask (docs/limits.md).
    way = "backward" if "draws" in BANK[name].tags else ("backward", "grad")[len(name) % 2]
    holds(BANK[name], way, READY[len(name) % len(READY)], layout)


# What may be around a step, and in which ways it is differentiated there.
PLAIN = ["backward", "double", "partial", "two_forwards"]
FUNC = ["grad", "vjp", "jvp", "vmap_grad", "hessian", "grad_grad"]
AROUND = {
    "inference": FUNC,
    "mode": PLAIN + FUNC,
    "mode forward": PLAIN,
    "clones": PLAIN,
    "clones back": PLAIN,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_program_with_something_around(name: str) -> None:
    """A mode of the user's that changes results, inference mode under torch.func, hooks that make copies."""
    at, source = number(name), BANK[name].source
    around = list(AROUND)[at % len(AROUND)]
    if "mode" in around and "checkpoint(" in source:
        pytest.skip("torch's checkpoint runs the function again without the mode: the plain side is wrong")
    holds(BANK[name], AROUND[around][at // 5 % len(AROUND[around])], READY[at % len(READY)], around=around)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if BANK[name].tags & {"buffers", "scans"}])
def test_program_with_tensors_of_a_users_class(name: str) -> None:
    way = "backward" if "buffers" in BANK[name].tags else "result_written"
    holds(BANK[name], way, READY[number(name) % len(READY)], around="class")


# (What runs again as a whole is told.)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in NAMES if BANK[name].flags and "raw" not in BANK[name].tags]
)
def test_flags_that_are_turned_before_the_backward(name: str) -> None:
    """Ops run again as they ran, whatever has become of what the function read since."""
    holds(BANK[name], "backward", READY[number(name) % len(READY)], late=True)


# Derivatives of higher order, and what traces.
DEAR = "hessian jacrev jacfwd third mixed vmap_hessian plain_over_jvp".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in DEAR for name in NAMES if number(way, name) % 48 == 0]
)
def test_program_in_a_dear_way(way: str, name: str) -> None:
    if (name, way) not in expected.ENDS:
        holds(BANK[name], way, READY[number(name) % len(READY)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if "raw" in BANK[name].tags])
def test_memory_filled_past_torch_below_a_vmap(name: str) -> None:
    holds(BANK[name], "plain_over_vmap", ("nothing", "matmuls", "odd")[NAMES.index(name) % 3])


TRACED = ("PURE", "WRITES", "BUFFERS", "RANDOM", "COMMON")


def compiled(name: str, policy: str = "") -> None:
    """How it goes in a graph; that draws other numbers, and then the gradient is held to the loss's slope."""
    at, tags = NAMES.index(name), BANK[name].tags
    how = {"how": "differences" if "draws" in tags else ("backward", "grad")[0 if policy else at % 2]}
    forget()
    torch._dynamo.reset()
    program = subject(BANK[name], policy or READY[at % len(READY)])
    verdict = check(program, [how, how], torch.float64, backend="aot_eager")
    # What torch.compile or we refuse is loud.
    kinds = ("same", "memory") if policy else ("same", "memory", "invalid", "refused")
    assert verdict.kind in kinds, (name, verdict)


# Of the others Dynamo refuses most, and some it does not leave as it came; what was found in a way of its own
# runs in that.
COMPILES = set(
    "nests containers captures image names draws buffers writes modules decisions functions".split()
)
GRAPHS = [
    name for name, one in BANK.items() if one.kind in ("", *TRACED) and one.tags <= COMPILES and not one.found
]
ONE_OF_EACH = {tag: name for name in GRAPHS for tag in BANK[name].tags}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(ONE_OF_EACH.values())))
def test_program_of_a_tag_compiled(name: str) -> None:
    compiled(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "policy"), [(name, policy) for name, one in BANK.items() for policy in one.graphs]
)
def test_program_compiled_under_a_policy(name: str, policy: str) -> None:
    compiled(name, policy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GRAPHS[::5])
def test_program_compiled(name: str) -> None:
    compiled(name)


# -- the bank itself ---------------------------------------------------------------------------------------


def test_there_are_as_many_programs_as_were_meant() -> None:
    assert 250 <= len(BANK) <= 400


@pytest.mark.parametrize("name", NAMES)
def test_program_is_short_and_names_its_own(name: str) -> None:
    program = BANK[name]
    assert len(program.source.splitlines()) <= 16
    if program.kind:  # it is drawn as a statement, too
        assert not re.search(r"\b[xy] = ", program.source), "what it is given keeps its name"
    assert (
        "open(" not in program.source and "socket" not in program.source and "urlopen" not in program.source
    )


@pytest.mark.filterwarnings("ignore")
def test_programs_take_under_two_seconds_and_leave_nothing() -> None:
    """Without regions: what is slow by itself, or leaves something behind, is no program of the bank."""
    for name, program in BANK.items():
        model = subject(program, "nothing").build().double()
        x = torch.randn(3, *program.shape, dtype=torch.float64)
        before = torch.get_default_dtype(), torch.is_grad_enabled(), torch._C._len_torch_function_stack()
        start = time.process_time()
        with torch.no_grad():
            program.fn(model, x, x.cos())
        assert time.process_time() - start < 2, name
        assert before == (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch._C._len_torch_function_stack(),
        )


def test_what_is_expected_names_programs_and_ways_that_are_there() -> None:
    for way, names in expected.REFUSED.items():
        assert way in WAYS and names <= set(NAMES), (way, names - set(NAMES))
    tags = {tag for program in BANK.values() for tag in program.tags} | set(NAMES)
    for one in expected.OTHERWISE:
        assert set(one.ways.split()) <= set(WAYS) and set(one.what.split()) <= tags and one.why, one
