"""Programs that look like user code, with regions and without (`make fuzz` draws more of them)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bank import library
from tests.fuzz.__main__ import MODES, one
from tests.fuzz.program import MORE, draw
from tests.fuzz.run import check
from tests.fuzz.shrink import save, shrink
from tests.ways import AROUND, AROUND_FORWARD, Verdict, fetched

OUT = Path("out/fuzz")
# In tests of so many programs. (`make fuzz` takes any number.)
TOGETHER = 20
RANGES = [(m, at, at + TOGETHER) for m, n in (("eager", 100), ("func", 40)) for at in range(0, n, TOGETHER)]


def passes(mode: str, seeds: range, plans: bool = True) -> Counter[str]:
    """Run programs, with `plans` those with budgets, too, and save what fails, made small."""
    kinds: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        if not plans and draw(seed, MODES[mode][0]).plans:
            continue
        verdict = one(seed, mode)
        kinds[verdict.kind] += 1
        if verdict.kind == "failed":
            flavour, backend = MODES[mode]
            path = save(OUT, shrink(draw(seed, flavour), verdict, backend), verdict, backend)
            failed.append(f"{path}: {verdict.what}")
    assert failed == []
    return kinds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "first", "last"), RANGES)
def test_programs_are_as_without_remat(mode: str, first: int, last: int) -> None:
    kinds = passes(mode, range(10_000 + first, 10_000 + last))
    assert kinds["same"] >= 0.5 * sum(kinds.values())
    # What dead code saves is kept, too (docs/limits.md): a program in a hundred.
    assert mode == "func" or kinds["memory"] <= 1


def test_programs_have_memory_formats_modes_hooks_and_objects() -> None:
    drawn = [draw(seed, flavour) for flavour in ("eager", "func") for seed in range(MORE, MORE + 400)]
    steps = [step for program in drawn for step in program.steps]
    assert {step.get("layout") for step in steps} >= {"transposed", "strided", "expanded"}
    assert {step.get("around") for step in steps} >= {*AROUND, *AROUND_FORWARD}
    assert {step["how"] for step in steps} >= {"counted", "cloned", "on_cpu"}
    assert any(step.get("fetched") for step in steps)
    source = "".join(program.source() for program in drawn)
    for word in ("Accumulates", "Reversible", "irreps", "Lazy", "self.tree", "manual_seed", "Config("):
        assert word in source
    assert not any("layout" in step for step in draw(7, "eager").steps)


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_hooks_fetch_is_there_for_its_backward_alone() -> None:
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
    with fetched(layer):
        out = layer(x).sin().sum()
        assert layer.weight.eq(7).all()
        found = torch.autograd.grad(out, [x, *layer.parameters()])
    assert all(map(torch.equal, found, expected)) and not layer.weight.eq(7).any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", (30_000, 30_010))
def test_compiled_programs_are_as_without_remat(first: int) -> None:
    passes("aot_eager", range(first, first + 10))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_programs_of_inductor_are_as_without_remat() -> None:
    """Its compiler takes seconds for each: these are a handful, `make fuzz` takes any number."""
    kinds = passes("inductor", range(30_000, 30_004))
    assert kinds["same"]


FOUND: dict[str, Any] = {
    "what an inner region keeps and a view writes to, in a scan, second call": (
        """
class Model(Base):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
        self.tied[0].weight = self.lin.weight

    def forward(self, x, y):
        def region1(a1, b1):
            def region3(a3, b3):
                def region5(a5, b5):
                    v6 = b5.cos() * 2
                    t6 = v6.view(-1)[::2]
                    t6.mul_(2)
                    v7 = Twin.apply(v6, y)[0]
                    return v7
                v5 = R(region5, "ops")(b3, a1)
                v8 = self.tied(v5).cos()
                return v8
            v3 = R(region3, "nothing")(b1, b1)
            return v3
        v1 = SCAN(lambda h: region1(h, x), y, 2, 1, "nothing")
        v11 = v1
        if self.on1:
            v11 = y
        return v11
""",
        [{"how": "backward", "flip": ["on0", "on1"]}, {"how": "copied", "flip": ["on1"]}],
    ),
    "all is computed anew, writes to buffers among it": (
        """
class Model(Base):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.table = nn.Parameter(torch.randn(5, 4) / 2)
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("queue", torch.linspace(-1, 1, 32).view(8, 4))

    def forward(self, x, y):
        def region1(a1):
            def region2(a2):
                a2 = a2 * 1.5
                with torch.no_grad():
                    self.queue.copy_(torch.cat([a2.detach()[:1], self.queue[:-1]]))
                return a2 * self.queue[1].sin()
            v3 = torch.tanh(R(region2, "ops")(x) @ self.w)
            with torch.autocast("cpu", torch.bfloat16):
                v4 = self.lin(x).sin().to(x.dtype)
            def region5(a5, b5):
                v6 = torch.tanh(torch.bmm(y.view(-1, 2, 2), y.reshape(-1, 2, 2))).flatten(1)
                self.mean.lerp_(v6.detach().mean(0), 0.1)
                v7 = v6.sin() * self.mean.exp()
                v8 = v6 * self.table[torch.arange(len(v6)) % 5].sin()
                return torch.logsumexp(a5, 1, keepdim=True) + v4
            return R(region5, "odd")(v4, a1)
        return R(region1, "nothing")(x)
""",
        [{"how": "backward"}],
        "float32",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once(name: str) -> None:
    source, steps, *dtype = FOUND[name]
    assert check(source, steps, *dtype or ["float64"]).kind == "same"


# -- the machinery itself ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_difference_is_found_and_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where regions compute something else, one or two statements are left that show it."""
    right = library.remat
    monkeypatch.setattr(library, "remat", lambda fn, policy: right(lambda *a, **k: spoilt(fn(*a, **k))))
    drawn = ((p, check(p, p.steps, p.dtype)) for p in (draw(seed, "func") for seed in range(40)))
    program, verdict = next((p, v) for p, v in drawn if v.kind == "failed")
    small = shrink(program, verdict)
    assert len(list(small.statements())) <= len(list(program.statements()))
    assert sum(s.kind == "word" for body, at in small.statements() for s in [body[at]]) <= 2
    text = save(tmp_path, small, verdict).read_text()
    assert "check(SOURCE, STEPS" in text and "class Model(Base)" in text


def spoilt(out: object) -> object:
    return out * 1.001 if isinstance(out, torch.Tensor) else out


def test_a_refusal_counts_as_one() -> None:
    source = (
        "class Model(Base):\n    def forward(self, x, y):\n        return R(lambda x: x.mul_(2))(x + 0)\n"
    )
    verdict = check(source, [{"how": "backward"}], "float64")
    assert isinstance(verdict, Verdict) and verdict.kind == "refused" and "argument" in verdict.what


@pytest.mark.parametrize("flavour", ["eager", "func", "compile"])
def test_a_program_is_the_same_for_its_number(flavour: str) -> None:
    assert draw(7, flavour).source() == draw(7, flavour).source() != draw(8, flavour).source()
