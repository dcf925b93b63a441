"""The suites of benchmarks: right gradients from every peer, runs that go on, reports, arithmetic."""

from __future__ import annotations

import csv
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings, strategies as st

from benchmarks.common import jax_peer
from benchmarks.common.measures import counted as counting, flops_of, unwrapped
from benchmarks.common.models import SIZES, Around
from benchmarks.common.peers import Peer, peer
from benchmarks.suite import card, graph_tables, panel, runs
from benchmarks.suite.cases import Case, Measured, read
from benchmarks.suite.fits import largest
from benchmarks.suite.loaded import Results
from benchmarks.suite.panel import Panel
from benchmarks.suite.pareto import Point, dominates, factor, front, hypervolume, undominated
from benchmarks.suite.report import (
    PAGES,
    ROOT,
    SUITES as REPORTED,
    Report,
    counted,
    filled,
    headline,
    instructions,
    section,
)
from benchmarks.suite.suites import SUITES
from benchmarks.suite.tables import targets, verdict

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TINY = (("depth", 2), ("width", 64), ("heads", 4), ("seq", 16), ("batch", 2))
TORCH = ("torch checkpoint", "torch SAC", "torch SAC titan", "torch_remat")
OURS = ("save_nothing", "save_matmuls", "save_matmuls | save_attention", "names", "budget 0.6")


def tiny(
    model: str = "gpt2-medium", mode: str = "backward", peers: tuple[str, ...] = OURS, **options: Any
) -> Case:
    sizes = TINY if model != "unet" else (("depth", 2), ("width", 16), ("seq", 8), ("batch", 2))
    return Case("panel", model, ("none", *peers), mode, sizes=sizes, **options)


def measured(case: Case) -> dict[tuple[str, str], Measured]:
    return {(row.peer, row.metric): row for row in Panel.of(case).run()}


# -- models and peers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2-medium", "moe", "unet"])
def test_every_peer_has_the_gradients_of_no_remat_and_keeps_less(model: str) -> None:
    rows = measured(
        tiny(model, peers=("torch checkpoint", "torch SAC titan", "save_nothing", "save_matmuls"))
    )
    assert not [row for row in rows.values() if row.error]
    values = {key: row.value or 0.0 for key, row in rows.items()}
    assert (
        values["save_nothing", "kept"]
        <= 1.01 * values["torch checkpoint", "kept"]
        < 0.7 * values["none", "kept"]
    )
    assert values["save_nothing", "kept"] < values["save_matmuls", "kept"] < values["none", "kept"]
    assert values["save_nothing", "recomputed"] > values["save_matmuls", "recomputed"] >= 0


def test_under_torch_func_torch_s_peers_are_the_error_that_they_are() -> None:
    rows = measured(tiny(mode="vmap", peers=(*TORCH, *OURS), rounds=1))
    failed = {name: row.error for (name, _), row in rows.items() if row.error}
    assert set(failed) == set(TORCH)
    assert all("don't yet support saved tensor hooks" in error for error in failed.values())
    assert {name for name, metric in rows if metric == "step"} == {"none", *OURS}


@pytest.mark.parametrize("mode", ["step", "scan"])
def test_whole_steps_and_scans_have_the_right_gradients(mode: str) -> None:
    rows = measured(tiny("llama3-8b", mode, (*TORCH[:2], *OURS)))
    assert not [row for row in rows.values() if row.error]
    # A step that ignored its rate, or a scan that lost a layer, would differ by far more.
    assert all(
        (row.value or 0) < 1e-5 for (_, metric), row in rows.items() if metric == "gradient difference"
    )


@pytest.mark.parametrize("name", ["none", "save_nothing"])
def test_blocks_are_compiled_in_the_first_step_and_not_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers hands out another function of a layer in every call."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = tiny("hf-llama", "blocks", compiled=True)
    problem = panel.problem_of(case)
    step, graphs = panel.compiled_step(case, problem, peer(name)), []
    for _ in range(3):
        step(problem.params, problem.batch, lambda: None)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1] == graphs[2]


def flat(tree: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(tree)


def test_a_peer_with_wrong_gradients_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(fn: Any) -> Any:
        # The value is right, half of the gradient is lost.
        return lambda p, x: (out := fn(p, x)).detach() / 2 + out / 2

    wrong = Peer("wrong", "torch", Around(halved))
    monkeypatch.setattr(panel, "peer", lambda name: wrong if name == "wrong" else peer(name))
    rows = measured(tiny(peers=("wrong", "save_nothing"), rounds=1))
    assert "WrongGradient" in rows["wrong", "error"].error and ("wrong", "step") not in rows
    assert ("save_nothing", "step") in rows


def test_what_does_not_apply_is_a_row() -> None:
    rows = measured(tiny(peers=("torch budget dp 0.5", "jax save_nothing", "save_nothing")))
    assert "exists compiled only" in rows["torch budget dp 0.5", "error"].error
    assert rows["jax save_nothing", "error"].error
    assert ("save_nothing", "peak") in rows


@pytest.mark.skipif(not jax_peer.available(), reason="needs the extra jax")
@pytest.mark.parametrize("model", ["gpt2-medium", "llama3-8b"])
def test_jax_computes_the_same(model: str) -> None:
    case = tiny(model)
    one = Panel.of(case)
    for policy in ("none", "save_matmuls"):
        step = jax_peer.JaxStep(case.built(), one.problem, "backward", policy)
        for got, expected in zip(flat(step.gradients()), flat(one.expected), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


# -- measures -------------------------------------------------------------------------------------------


def test_flops_of_a_compiled_step_are_counted() -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    with counting() as counter:
        torch.compile(lambda x, w: (x @ w).sin().sum(), fullgraph=True)(x, w).backward()
    # x w, and the gradient of w; x asks for none.
    assert counter.flops == 2 * (2 * 8 * 16 * 4)


def test_an_op_that_runs_with_a_random_state_counts_as_that_op() -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    for node, shape in zip(nodes, [(16,), (8, 4), (4, 2)], strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")

    def run_with_rng_state() -> None: ...

    mm = torch.ops.aten.mm.default
    node = graph.call_function(run_with_rng_state, (nodes[0], mm, *nodes[1:]))
    assert flops_of(node) == 2 * 8 * 4 * 2
    assert unwrapped(mm, (1, 2)) == (mm, (1, 2))


@given(st.lists(st.integers(1, 40), min_size=30, max_size=30), st.integers(0, 600), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_the_largest_size_is_found(steps: list[int], limit: int, memory: int) -> None:
    peaks = [0, *itertools.accumulate(steps)]

    def peak(n: int) -> int | None:
        # Past its memory the device says no; past the list sizes go on as a line.
        return None if n > memory else peaks[n] if n < len(peaks) else peaks[-1] + n

    fitting = [n for n in range(1, memory + 1) if (peak(n) or 0) <= limit]
    found, tried = largest(peak, limit)
    assert found == max(fitting, default=0) and tried < 32


# -- fronts ---------------------------------------------------------------------------------------------

POINTS = st.lists(
    st.builds(Point, st.text("abc", max_size=2), st.integers(1, 9).map(float), st.integers(1, 9).map(float)),
    max_size=8,
)


@given(POINTS)
def test_hypervolume_is_the_area_that_is_dominated(points: list[Point]) -> None:
    # All coordinates are whole: a unit square is dominated as a whole or not at all.
    squares = [
        (m, t)
        for m, t in itertools.product(range(10), repeat=2)
        if any(p.memory <= m and p.time <= t for p in points)
    ]
    assert hypervolume(points, (10.0, 10.0)) == pytest.approx(len(squares) / 100)


@given(POINTS, POINTS)
def test_fronts_and_domination(theirs: list[Point], ours: list[Point]) -> None:
    beaten = [p for p in theirs if any(q.memory <= p.memory and q.time <= p.time for q in ours)]
    assert [p for p, _ in undominated(theirs, ours)] == [p for p in theirs if p not in beaten]
    best = front(theirs)
    assert all(not dominates(a, b) for a, b in itertools.permutations(best, 2))
    assert all(any(dominates(b, p) for b in best) for p in theirs)
    for p in theirs if ours else []:
        # Grown by its factor the point is dominated, and by any less it is not.
        f = factor(p, ours)
        assert any(dominates(o, Point("", p.memory * f * 1.001, p.time * f * 1.001)) for o in ours)
        assert not any(dominates(o, Point("", p.memory * f * 0.999, p.time * f * 0.999)) for o in ours)


# -- runs -----------------------------------------------------------------------------------------------


def stub(calls: list[str], fail: str = "") -> Any:
    """In place of a process: notes the case and gives two rows for it."""

    def run_case(case: Case, python: str, timeout: float) -> tuple[list[dict[str, Any]], str]:
        calls.append(case.name)
        blank = Measured.of(case)
        row = replace(blank, peer="none").with_value("peak", "bytes", 1.0)
        shared = {"torch": runs.torch_version(python), "commit": runs.commit(), "python": "3"}
        rows = [shared | vars(row)]
        error = "died" if case.name == fail else ""
        return rows + ([shared | vars(blank.failed(error))] if error else []), error

    return run_case


def test_a_run_goes_on_where_it_stopped_and_tries_failures_again(tmp_path: Path, monkeypatch: Any) -> None:
    cases = [tiny(model) for model in list(SIZES)[:3]]
    path, first, second, third = tmp_path / "quick.csv", [], [], []
    monkeypatch.setattr(runs, "run_case", stub(first, fail=cases[1].name))
    assert runs.execute(cases[:2], path, (sys.executable,), 5.0, fresh=False) == 1
    monkeypatch.setattr(runs, "run_case", stub(second))
    assert runs.execute(cases, path, (sys.executable,), 5.0, fresh=False) == 0
    assert first == [c.name for c in cases[:2]] and second == [c.name for c in cases[1:]]
    with path.open(newline="") as file:
        rows = [read(line) for line in csv.DictReader(file)]
    assert sorted(row.case for row in rows) == sorted(c.name for c in cases) and not any(
        r.error for r in rows
    )
    # The file is complete: asked again, everything is measured again.
    monkeypatch.setattr(runs, "run_case", stub(third))
    runs.execute(cases, path, (sys.executable,), 5.0, fresh=False)
    assert third == [c.name for c in cases]


def test_no_case_is_started_that_would_end_too_late(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []
    monkeypatch.setattr(runs, "run_case", stub(calls))
    cases = [tiny(seconds=500.0), tiny("moe", seconds=2.0)]
    assert runs.execute(cases, tmp_path / "card.csv", (sys.executable,), 1.0, fresh=False) == 1
    assert calls == [cases[1].name]


def test_a_case_whose_process_fails_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "quick.csv"
    assert runs.execute([Case("records", "nonsense")], path, (sys.executable,), 5.0, fresh=False) == 1
    with path.open(newline="") as file:
        (line,) = csv.DictReader(file)
    row = read(line)
    assert row.metric == "error" and "KeyError" in row.error and line["torch"] == torch.__version__


def test_a_case_that_takes_too_long_is_stopped() -> None:
    rows, error = runs.run_case(tiny(), sys.executable, timeout=0.2)
    assert error == "stopped after 0 s" and rows[-1]["error"] == error


@pytest.mark.parametrize("suite", SUITES)
def test_the_cases_of_a_suite_can_be_told_apart_built_and_sent(suite: str) -> None:
    cases = SUITES[suite]()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert Case.from_json(case.to_json()) == case
        assert case.kind == "records" or case.built().name == case.model
        assert all(peer(name).name == name for name in case.peers)


# -- reports --------------------------------------------------------------------------------------------


def report(folder: Path) -> tuple[str, str]:
    """README and docs page of a small CSV."""
    compiled = tiny("llama3-8b", compiled=True, dtype="bfloat16")
    points = {
        "none": (100, 10.0),
        "torch SAC": (60, 12.0),
        "save_matmuls": (50, 11.4),
        "jax save_matmuls": (80, 9.0),
    }
    rows = [replace(Measured.of(compiled), peer=n, family=peer(n).family) for n in points]
    made = [row.with_value("peak", "bytes", points[row.peer][0] * 2**20) for row in rows]
    made += [
        row.with_spread("step", "ms", (points[row.peer][1] - 1, points[row.peer][1], 20.0)) for row in rows
    ]
    made.append(
        replace(Measured.of(compiled), peer="torch checkpoint", family="torch").failed("broke | badly")
    )
    fit = Case("fit", "llama3-8b", vary="batch", limit=1 << 20, sizes=TINY)
    for name, size, rate in (("torch SAC", 4, 5.0), ("save_nothing", 8, 4.0), ("save_matmuls", 6, 5.0)):
        row = replace(Measured.of(fit), peer=name, family=peer(name).family)
        made += [
            row.with_value("largest batch", "", size),
            row.with_spread("batch a second", "1/s", (rate, rate, rate)),
        ]
    made.append(Measured.of(replace(fit, vary="seq")).failed("stopped after 9 s"))
    shared = dict.fromkeys(runs.CONTEXT, "1") | {"hardware": "Abacus 3000", "torch": "2.13.0"}
    runs.write(folder / "quick.csv", [shared | vars(row) for row in made])
    (folder / "docs" / "measured").mkdir(parents=True, exist_ok=True)
    marks = "<!-- {0}: generated -->\nold\n<!-- {0} ends -->\n"
    (folder / "README.md").write_text("README\n")
    for page in set(PAGES.values()):
        there = [suite for suite in REPORTED if PAGES[suite] == page]
        (folder / "docs" / page).write_text("".join(map(marks.format, [*there, "instructions"])))
    assert Report(folder, folder)() == 0
    return (folder / "README.md").read_text(), (folder / "docs" / "measured" / "benchmarks.md").read_text()


def test_a_report_is_made_of_the_csv(tmp_path: Path) -> None:
    readme, docs = report(tmp_path)
    assert readme == "README\n" and "old" not in docs
    assert "Abacus 3000" in docs and "| `save_matmuls` |  | 50.0 |  | 11.4 (10.4-20.0) |  |" in docs
    assert "| `torch checkpoint` | broke \\| badly |" in docs and "](../figures/quick_1.svg)" in docs
    drawn = ElementTree.parse(tmp_path / "docs" / "figures" / "quick_1.svg").getroot()
    assert "save_matmuls" in {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert "there is no `benchmarks/results/card.csv`" in (tmp_path / "docs" / PAGES["card"]).read_text()
    # JAX's point is not dominated: the nearest of ours needs 11.4 / 9 of its time.
    assert "`jax save_matmuls` (1.25)" in docs or "`jax save_matmuls` (1.27)" in docs
    assert "seq within 1 MiB cpu float32 | stopped after 9 s |" in docs
    assert report(tmp_path) == (readme, docs)


def test_targets_are_told_with_how_much_they_were_missed_by(tmp_path: Path) -> None:
    report(tmp_path)
    results = Results.load(tmp_path / "quick.csv")
    assert results is not None
    told = {target.claim.split(": ")[-1]: (target.value, verdict(target)) for target in targets(results)}
    assert told["time over torch's best, worst memory point"] == (pytest.approx(11.4 / 12), "met")
    # On a CPU XLA drops the barrier of JAX's checkpoint.
    assert not [claim for claim in told if "JAX" in claim]
    # Not save_nothing's 8: that is slower than torch SAC.
    assert told["torch SAC's over ours at its throughput"] == (pytest.approx(4 / 6), "met")


def test_tables_of_graphs_are_what_the_committed_csv_says() -> None:
    for path, texts in graph_tables.pages(graph_tables.load(ROOT / "benchmarks" / "results")).items():
        page = (ROOT / path).read_text()
        for name, text in texts.items():
            assert filled(page, name, text) == page


def on_a_card(peak: float, step: float) -> Results:
    """Made up: one peer of Llama's four blocks, with a peak in MiB and a step in ms."""
    case = next(c for c in SUITES["card"]() if c.name == "panel llama3-8b backward compiled cuda bfloat16")
    row = replace(Measured.of(case), peer="save_nothing", family="remat")
    rows = [row.with_value("peak", "bytes", peak * 2**20), row.with_value("step", "ms", step)]
    return Results("card", {"hardware": "NVIDIA H100 80GB HBM3"}, rows, ["2.13.0"] * 2, ["c"] * 2)


def test_the_simulation_is_held_against_a_card() -> None:
    graphs = graph_tables.load(ROOT / "benchmarks" / "results")
    mode = "llama3-8b, 4 blocks, 1 x 8192, h100, backward"
    peak, time = (
        graph_tables.value([row for row in graphs if row["mode"] == mode], "save_nothing", metric)
        for metric in ("peak", "roofline")
    )
    for share, slower, expected in ((1.04, 1.1, "met"), (1.06, 1.1, "missed"), (1.0, 1.2, "missed")):
        table = card.simulated(graphs, on_a_card(peak * share, time * slower))
        (line,) = [line for line in table.splitlines() if line.startswith("| llama3")]
        assert line.endswith(f"{1 / slower - 1:+.1%} | {expected} |")
    assert "not measured" in card.simulated(graphs, None).lower()
    # The cases that both have: two blocks in one graph are such, the deep models block by block are not.
    compiled = [case.built() for case in SUITES["card"]() if case.compiled and case.mode in ("step", "scan")]
    shared = {f"{one.name}, {getattr(one, 'depth')} blocks" for one in compiled}  # noqa: B009
    assert shared == {"llama3-8b, 2 blocks"} <= {", ".join(row["mode"].split(", ")[:2]) for row in graphs}


def test_readme_and_docs_are_what_the_committed_csvs_say() -> None:
    folder = ROOT / "benchmarks" / "results"
    readme = (ROOT / "README.md").read_text()
    counts = counted(folder)
    measured = Results.load(folder / "card.csv")
    assert measured is not None and filled(readme, "card", headline(measured)) == readme
    page = (ROOT / "docs" / "measured" / "benchmarks.md").read_text()
    assert filled(page, "instructions", instructions(counts)) == page
    for suite in REPORTED:
        docs = (ROOT / "docs" / PAGES[suite]).read_text()
        assert filled(docs, suite, section(suite, Results.load(folder / f"{suite}.csv"), ROOT)) == docs
