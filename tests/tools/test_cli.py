"""The command line: the sweep end to end at a tiny size, its measures, its verdict, its errors."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

from remat import explain
from remat.policies import save_attention, save_every_nth, save_matmuls, save_names
from tests.helpers import TORCH, crossed, custom
from tests.tools.inside import (
    COMMANDS,
    Env,
    Result,
    Sizes,
    UsageError,
    Work,
    batches,
    build,
    cli_rows,
    difference,
    machine,
    main,
    make_step,
    parse,
    progress,
    rows,
    tensors,
    trace_memory,
    unmarked,
)

SVG = "{http://www.w3.org/2000/svg}"

TINY = "--depth 2 --width 16 --heads 2 --seq 16 --batch 2 --steps 2".split()
SIZES = Sizes(depth=2, width=16, heads=2, seq=16)


def sweep(out: Path, *args: str) -> int:
    return main(["sweep", *TINY, "--out", str(out), *args])


def swept(capsys: pytest.CaptureFixture[str], out: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and rows by policy of a tiny sweep."""
    code = sweep(out, "--json", *args)
    return code, {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "model"), crossed(["func", "backward", "vmap"], ["gpt", "llama"], every=6))
def test_sweep_measures_every_default_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, mode: str
) -> None:
    code, got = swept(capsys, tmp_path, "--mode", mode, "--model", model, "--dtype", "float64")
    assert code == 0
    assert list(got) == list(cli_rows.DEFAULT)
    ours = [row for row in got.values() if not row["rival"]]
    assert all(row["error"] is None and row["gradient_difference"] <= 1e-10 for row in ours)
    assert all(row["loss_difference"] <= 1e-10 for row in ours)
    none, nothing, matmuls = got["none"], got["save_nothing"], got["save_matmuls"]
    assert nothing["kept_bytes"] < matmuls["kept_bytes"] < none["kept_bytes"]
    assert nothing["ops_recomputed"] > matmuls["ops_recomputed"] > 0 == none["ops_recomputed"]
    assert got["save_everything"]["ops_recomputed"] == 0
    assert nothing["flops_recomputed"] > matmuls["flops_recomputed"]


@pytest.mark.slow
def test_torch_checkpoint_under_vmap_is_recorded_as_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, got = swept(capsys, tmp_path, "--mode", "vmap", "--policy", "torch_checkpoint", "save_nothing")
    assert code == 0
    # 2.11 saves the arguments by an autograd.Function that has no rule for vmap.
    words = "saved tensor hooks" if TORCH >= (2, 13) else "does not have vmap support"
    assert words in got["torch_checkpoint"]["error"]
    assert got["torch_checkpoint"]["peak_bytes"] is None
    # The rows after a rival's failure are not touched by it.
    assert got["save_nothing"]["error"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), crossed(["backward", "func"], ["gpt2", "llama"], every=3))
def test_sweep_of_hugging_face_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, mode: str
) -> None:
    pytest.importorskip("transformers")
    args = ("--model", f"hf:{name}", "--mode", mode, "--policy", "save_nothing", "save_matmuls")
    code, got = swept(capsys, tmp_path, *args)
    assert code == 0, got
    assert got["save_nothing"]["kept_bytes"] < got["none"]["kept_bytes"]
    assert got["save_nothing"]["ops_recomputed"] > 0


@pytest.mark.slow
def test_sweep_leaves_a_csv_a_chart_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sweep(tmp_path, "--policy", "save_nothing", "save_matmuls|save_attention") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("none", "save_nothing", "save_matmuls | save_attention"))
    assert "gradients agree with no remat" in shown and "…" not in shown
    with (tmp_path / "sweep.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["policy"] for record in records] == [
        "none",
        "save_nothing",
        "save_matmuls | save_attention",
    ]
    assert records[0]["torch"] == torch.__version__ and records[0]["hardware"] and records[0]["width"] == "16"
    assert int(records[1]["kept_bytes"]) < int(records[0]["kept_bytes"])
    svg = ElementTree.parse(tmp_path / "sweep.svg").getroot()
    texts = {text.text for text in svg.iter(f"{SVG}text")}
    assert {"none", "save_nothing", "save_matmuls | save_attention"} <= texts


def test_sweep_fails_on_a_wrong_gradient(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(policy: Any, fn: Any) -> Any:
        # Right values, and a gradient that is off by one part in a thousand.
        skewed = custom(torch.clone, lambda g, x: g * 1.001)
        return lambda p, x: skewed(fn(p, x))

    monkeypatch.setattr(cli_rows, "remat_under", wrong)
    assert sweep(tmp_path, "--policy", "save_nothing") == 1
    shown = capsys.readouterr().out
    assert "wrong gradients: save_nothing" in shown and "failed: save_nothing" in shown


@pytest.mark.slow
def test_sweep_fails_when_a_policy_raises_and_measures_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cli_rows.remat_under

    def broken(policy: Any, fn: Any) -> Any:
        if policy is save_matmuls:
            raise RuntimeError("on purpose")
        return real(policy, fn)

    monkeypatch.setattr(cli_rows, "remat_under", broken)
    code, got = swept(capsys, tmp_path, "--policy", "save_matmuls", "save_nothing")
    assert code == 1
    assert got["save_matmuls"]["error"] == "RuntimeError: on purpose"
    assert got["save_nothing"]["error"] is None and got["save_nothing"]["step_ms_p50"] is not None


def test_a_rival_does_not_fail_the_sweep_but_its_wrong_gradient_is_told() -> None:
    rival = Result("torch_checkpoint", tolerance=1e-5, rival=True, gradient_difference=1.0)
    assert rival.wrong and not rival.failed
    assert Result("save_nothing", tolerance=1e-5, gradient_difference=1.0).failed
    assert Result("save_nothing", tolerance=1e-5, gradient_difference=math.nan).failed


def test_main_lists_commands_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told and text in told for name, (_, text) in COMMANDS.items())
    assert main([]) == 2
    assert main(["swep"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'sweep'?" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"usage: remat {name}" in capsys.readouterr().out


def test_schedule_draws_what_a_scan_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("schedule --length 4 --slots 2".split()) == 0
    # Two carries at most, from the forward down to the first step's reversal.
    drawn = capsys.readouterr().out.splitlines()
    assert drawn[-7:] == ["o>o>  forward", "o o", "o o<", "o <", "o", "o<", "<"]
    assert main("schedule --kind revolv".split()) == 2
    assert "'revolv' is none of revolve, online" in capsys.readouterr().err
    assert main("schedule --slots 0".split()) == 2
    assert "at least one carry" in capsys.readouterr().err


def test_env_says_what_the_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__ and set(facts["extras"]) == {"cli", "plan", "hf", "bench"}
    assert Env()() == 0
    out = capsys.readouterr().out
    assert machine()["hardware"] in out and "matmul 3e+05" in out and "0 us a call" in out
    assert facts["speeds"]["matmul"] == 300e12


def test_rows_are_policies_as_one_writes_them() -> None:
    assert parse("save_matmuls | save_attention") == save_matmuls | save_attention
    assert parse("~(save_matmuls & save_attention)") == ~(save_matmuls & save_attention)
    assert parse("save_names('q', 'k')") == save_names("q", "k")
    assert parse("save_every_nth(2, save_matmuls)") == save_every_nth(2, save_matmuls)
    assert parse("save_larger_than('1KiB')") == parse("save_larger_than(1024)")
    assert [row.name for row in rows(("save_matmuls", "none", "save_matmuls"))] == ["none", "save_matmuls"]
    with pytest.raises(UsageError, match="is no policy"):
        parse("save_names")


def test_memory_is_counted_in_bytes_from_the_start_of_the_step() -> None:
    def step(mark: Any) -> torch.Tensor:
        kept = torch.ones(1000)
        temporary = torch.ones(3000)
        del temporary
        mark()
        return torch.ones(2000) + kept.sum()

    memory = trace_memory(step)
    assert memory.kept == 4000
    # At the end: what is kept, its sum, the last tensor and the result.
    assert memory.peak == 4000 + 4 + 8000 + 8000


def test_work_counts_ops_and_flops_without_views() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    q = torch.ones(1, 2, 8, 4)
    with Work() as product:
        (a @ b).t().detach()
    with Work() as attention:
        F.scaled_dot_product_attention(q, q, q)
    assert product.ops == {"mm": 1} and product.flops == 2 * 3 * 4 * 5
    # Two products of 8 x 4 by 4 x 8 and 8 x 8 by 8 x 4, in each of two heads.
    assert attention.flops == 2 * (2 * 8 * 4 * 8 + 2 * 8 * 8 * 4)
    assert product.beyond(product) == (0, 0) and product.beyond(attention)[0] == 1


def test_difference_is_relative_and_never_hides_a_nan() -> None:
    one = {"w": torch.tensor([1.0, 100.0])}
    assert difference(one, one) == 0
    assert difference({"w": torch.tensor([2.0, 100.0])}, one) == pytest.approx(0.01)
    assert difference({"w": torch.tensor([math.nan, 100.0])}, one) == math.inf
    assert difference(one, {"w": torch.tensor([math.nan, 100.0])}) == math.inf
    assert difference({"w": None}, one) == math.inf


def test_modes_agree_on_loss_and_gradients() -> None:
    model = build("gpt", SIZES, torch.float64, torch.device("cpu"))
    tokens = next(batches(2, SIZES.seq))
    steps = {mode: make_step(mode, model, lambda fn: fn) for mode in ("backward", "func", "vmap")}
    got = {mode: step(model.params, tokens, unmarked) for mode, step in steps.items()}
    torch.testing.assert_close(got["func"], got["backward"])
    torch.testing.assert_close(got["vmap"][0].mean(), got["backward"][0])
    mean = [g.mean(0) for g in tensors(got["vmap"][1])]
    torch.testing.assert_close(mean, tensors(got["backward"][1]))


@pytest.mark.parametrize(("name", "title"), [("net", "Sequential"), ("loss", "loss")])
def test_what_leads_to_parameters_is_planned_where_they_are(tmp_path, monkeypatch, capsys, name, title):
    (tmp_path / "planned_net.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))\n"
        "def loss(x):\n    return net(x).square().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", f"planned_net:{name}", "--input", "8x16", "--budget", "0.5"]) == 0
    assert f"Plan for {title}" in capsys.readouterr().out


def test_figures_are_not_cut_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["compare", "torch:sin", "--input", "4x4"]) == 0
    shown = capsys.readouterr()
    assert "…" not in shown.out and "save_matmuls | save_attention" in shown.out
    assert shown.err == "remat compare is deprecated: write remat explain --policy all.\n"


NET = """
import torch
from torch import nn
from remat import remat
blocks = [remat(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))) for _ in range(2)]
def net(x):
    for block in blocks:
        x = x + block(x)
    return x
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["save_matmuls", "budget=0.5", "names=q"])
@pytest.mark.filterwarnings("ignore:.*names")
def test_the_page_of_one_policy_has_a_slider(tmp_path, monkeypatch, capsys, policy):
    (tmp_path / "sliding_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    line = ["explain", "sliding_net:net", "--input", "8x32", "--policy", policy]
    assert main([*line, "--html", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    labels = re.findall(r'"label": ?"([^"]*)"', page)
    assert "save_nothing" in labels and "save_everything" in labels and "as it is" in labels
    capsys.readouterr()


@pytest.mark.slow
def test_ops_of_torchs_own_modules_have_its_line(tmp_path):
    text = "from torch import nn\n\nnet = nn.Sequential(nn.Linear(8, 8), nn.GELU())\n"
    (tmp_path / "torchs_net.py").write_text(text)
    line = [sys.executable, "-m", "remat", "explain", "torchs_net:net", "--input", "4x8"]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "aten.addmm at linear.py:" in ran.stdout and "unknown line" not in ran.stdout


def test_progress_is_seen_in_a_pipe(capsys):
    advance = progress(quiet=False)
    for _ in range(20):
        advance(0.05)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "training under each policy: 0 %" and said[-1] == "training under each policy: 100 %"
    assert len(said) == 11
    progress(quiet=True)(1.0)
    assert not capsys.readouterr().err


def test_ops_of_a_built_in_model_have_lines():
    model = build("gpt", SIZES, torch.float32, torch.device("cpu"))
    tokens = next(batches(2, SIZES.seq))
    found = explain(lambda params: model.loss(params, tokens, lambda fn: fn), model.params)
    kept = [residual for residual in found.kept if residual.op is not None]
    assert kept and all(residual.location is not None for residual in kept)
    assert any("transformer.py:" in str(residual.location) for residual in kept)
