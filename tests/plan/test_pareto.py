"""The frontier and the plan command."""

import itertools
import json
import re
from xml.etree import ElementTree

import pytest
import torch

import remat
from benchmarks.planner.compiled import compiled_problem
from remat import RematError
from remat.plan import Plan, pareto
from tests.helpers import crossed
from tests.inside import main
from tests.plan.inside import Flops, complete, record, solve, torch_plan
from tests.plan.models import GPTBlock, LlamaBlock


@pytest.mark.slow
def test_nobody_is_below_the_bound_and_the_exact_plan_touches_it():
    frontier = pareto(GPTBlock(32, 4), torch.randn(2, 8, 32), points=6)
    planners = {p.planner for p in frontier.points}
    assert {
        "remat",
        "bound",
        "save_matmuls",
        "save_nothing",
        "torch dp",
        "torch ilp",
        "torch greedy",
    } <= planners
    assert all(p.gap <= 0.005 for p in frontier.of("remat"))
    costs = [p.cost for p in frontier.of("remat")]
    assert costs == sorted(costs, reverse=True) and costs[-1] == 0
    for point in frontier.points:
        better = [
            p
            for p in frontier.of("bound")
            if p.kept_bytes <= point.kept_bytes and p.cost < point.cost * (1 - 1e-6)
        ]
        assert point.planner != "remat" or not better or point.gap > 0
    head, *rows = frontier.to_csv().splitlines()
    assert head.startswith("planner,budget,kept_bytes") and len(rows) == len(frontier.points)
    assert "save_matmuls" in str(frontier)


BLOCKS = {"gpt": lambda: GPTBlock(64, 4), "llama": lambda: LlamaBlock(64, 8, 2, 96)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "solver"), crossed(BLOCKS, ["dp", "ilp", "greedy"]))
def test_never_worse_than_torch_on_the_same_graph(name, solver):
    block = BLOCKS[name]()
    x = torch.empty(2, 32, 64, requires_grad=True) * 1
    rest = [torch.empty(32, 4) for _ in range(2)] if name == "llama" else []
    joint = record(block, (x, *rest))
    compiled = compiled_problem(joint, Flops())
    for budget in (0.0, 0.2, 0.5, 0.8, 1.0):
        saved = compiled.saved(set(torch_plan(joint, budget, solver).values))
        theirs = complete(compiled.problem, saved)
        assert theirs is not None
        ours = solve(compiled.problem, theirs.bytes, candidates=[("torch", saved)]).solution
        assert ours.bytes <= theirs.bytes and ours.cost <= theirs.cost


def block(w, x):
    return torch.tanh(x @ w) @ w


def case():
    return GPTBlock(32, 4), torch.randn(2, 8, 32)


def test_plan_command_prints_a_plan_and_writes_it(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", f"{__name__}:case", "--budget", "free", "--out", str(out)]) == 0
    assert "Plan for GPTBlock: keeps" in capsys.readouterr().out
    assert Plan.from_json(out.read_text()).recomputed_flops == 0
    assert json.loads(out.read_text())["region"] == "GPTBlock"


def test_a_frontier_prints_what_comes_out_alike_as_one_row():
    fn, *args = case()
    rows = [re.split(" {2,}", line.strip()) for line in str(pareto(fn, *args, points=3)).splitlines()[1:]]
    heads, *figures = [tuple(row[1:]) for row in rows]
    assert heads == ("kept", "share", "replay", "cost", "gap") and len(set(figures)) == len(figures)
    (names,) = [row[0] for row in rows if "save_weight_matmuls" in row[0]]
    assert names == "save_matmuls, save_weight_matmuls"


def test_a_frontier_is_drawn_with_labels_that_stand_in_the_picture_and_apart(tmp_path):
    fn, *args = case()
    found = pareto(fn, *args, points=3)
    found.plot(tmp_path / "frontier.svg")
    svg = ElementTree.parse(tmp_path / "frontier.svg").getroot()
    _, _, wide, high = map(float, svg.attrib["viewBox"].split())
    texts = [t for t in svg.iter("{http://www.w3.org/2000/svg}text") if t.get("class")]
    assert {t.text for t in texts} == {p.planner for p in found.points}
    spots = [(float(t.attrib["x"]), float(t.attrib["y"]), 7.2 * len(t.text or "")) for t in texts]
    assert all(0 <= x and x + size <= wide and 0 <= y <= high for x, y, size in spots)
    for (x, y, size), (a, b, other) in itertools.combinations(spots, 2):
        assert abs(y - b) >= 10 or x + size <= a or a + other <= x
    assert "prefers-color-scheme:dark" in (tmp_path / "frontier.svg").read_text()


@pytest.mark.slow
def test_plan_command_writes_the_frontier(tmp_path, capsys):
    args = [f"{__name__}:block", "--input", "8x8", "--input", "4x8", "--points", "3"]
    assert main(["plan", *args, "--csv", str(tmp_path / "f.csv")]) == 0
    assert "save_everything" in capsys.readouterr().out
    assert (tmp_path / "f.csv").read_text().startswith("planner,")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere:fn"], "cannot be loaded"),
        (["remat"], "write MODULE:FN"),
        ([f"{__name__}:block"], "takes arguments"),
        ([f"{__name__}:block", "--input", "8xx"], "is no tensor"),
        ([f"{__name__}:case", "--budget", "7 parsecs"], "is not a budget"),
    ],
)
def test_plan_command_errors(args, message, capsys):
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_regions_alone_is_told():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    remat.apply(model, layers="*")
    with pytest.raises(RematError, match=r"regions already \(0, .*remat\.remove\(model\).*remat\.fit"):
        pareto(model, torch.ones(2, 8))
    assert pareto(remat.remove(model), torch.ones(2, 8), points=2, torch_solvers=()).default_bytes > 0
