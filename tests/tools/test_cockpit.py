"""The cockpit: live bytes are the engine's, the page needs nothing else and draws what it was given."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from remat import RematError, checkpoint_name, explain, remat, save_everything, save_names, save_nothing
from remat.nn import apply
from tests.helpers import rand
from tests.tools.inside import BUILT_IN, CATEGORIES, format_bytes

X, W1, W2 = rand(4, 8), rand(8, 16), rand(16, 8)
FLOAT = 8
GIB = 2**30


def block(x, w1, w2):
    h = checkpoint_name(torch.tanh(x @ w1), "h")
    return x + torch.sin(h @ w2)


def loss(x, w1, w2, depth=3):
    wrapped = remat(block, policy=save_names("h"))
    for _ in range(depth):
        x = wrapped(x, w1, w2)
    return x.square().sum()


@pytest.fixture(scope="module")
def found():
    return explain(loss, X, W1, W2)


def bytes_by_category(timeline):
    found = dict.fromkeys(CATEGORIES, 0)
    for block in timeline.waiting():
        found[block.category(timeline.boundary)] += block.bytes
    return found


def test_the_timeline_is_what_the_report_counts(found):
    for side in (found.now, found.plain):
        assert max(side.timeline.live()) == side.peak
        assert side.timeline.arguments == FLOAT * (4 * 8 + 2 * 8 * 16)
    waiting = bytes_by_category(found.now.timeline)
    h, x = FLOAT * 4 * 16, FLOAT * 4 * 8
    # Each region's h; the inputs of the second and third region; what the square reads; the loss itself.
    assert waiting == dict.fromkeys(CATEGORIES, 0) | {"policy": 3 * h, "inputs": 2 * x, "autograd": x + FLOAT}
    assert bytes_by_category(found.plain.timeline)["autograd"] > 3 * h + 3 * x
    again = [b for b in found.now.timeline.blocks if b.category(found.now.timeline.boundary) == "recomputed"]
    assert again and {b.region for b in again} == {"block"}
    assert not [b for b in found.plain.timeline.blocks if b.when == "recompute"]


def test_a_step_that_calls_backward_itself_has_a_boundary():
    def both(x, w1, w2):
        w = w1.clone().requires_grad_()
        loss(x, w, w2).backward()
        return x.clone().requires_grad_().sum()

    timeline = explain(both, X, W1, W2).now.timeline
    assert {ran.when for ran in timeline.ops} == {"forward", "recompute", "backward"}


def test_figures_as_plain_data(found):
    record = json.loads(found.to_json())
    assert record == json.loads(json.dumps(found.to_dict()))
    assert record["kept_bytes"] == found.kept_bytes and record["now"]["peak_bytes"] == found.now.peak
    assert sum(r["bytes"] for r in record["kept"]) == found.kept.bytes
    used = found.now.peak + found.now.timeline.arguments
    assert record["fits"]["H100-80"] == {
        "fits": True,
        "memory_bytes": 79 * GIB,
        "spare_bytes": 79 * GIB - used,
    }
    rows = json.loads(explain(loss, X, W1, W2, policies=[save_names("h")]).to_json())["rows"]
    assert [row["policy"] for row in rows] == ["save_names('h')"]


# -- the page -----------------------------------------------------------------------------------------


def drawn(path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's script")
    script = Path(__file__).with_name("cockpit_page.js")
    done = subprocess.run([node, script, path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_draws_what_was_measured(found, tmp_path):
    found.save(tmp_path / "report.html")
    page = drawn(tmp_path / "report.html")
    assert page["peaks"] == [found.plain.peak, found.now.peak]
    # Arguments, policy, inputs, autograd, recomputed, others: all six categories are there.
    assert len(set(page["drawn"]) - {"#1c1c1c"}) == 6
    assert "test_cockpit.py:" in page["tip"] and "alive" in page["tip"] and " ms on H100-80" in page["tip"]
    assert page["regions"] == ["arguments and weights", "outside of regions", "block"]
    down, up, prices = page["firsts"][1], page["firsts"][0], page["firsts"][2]
    assert down == up[::-1] or sorted(down) == sorted(up)
    assert prices[0] == max(prices, key=lambda text: float(text or -1))
    # Three regions keep the same h: one row, with its shape and what all three take.
    h = [row for row in page["kinds"] if row[6] == "h, aten.tanh.default"]
    assert [row[1:4] for row in h] == [["3", "kept by policy", "f64[4,16]"]]
    assert h[0][0] == format_bytes(3 * FLOAT * 4 * 16)
    # Blocks stand on the time axis of both, also where regions are plain functions.
    assert page["blocks"][0][0] == page["blocks"][1][0] == "block" and len(page["blocks"][0]) > 1
    used = found.now.peak + found.now.timeline.arguments
    assert page["fits"][1].startswith("as it is: ") and "fits an H200-141: yes" in page["fits"][1]
    assert used < 79 * GIB


def test_without_regions_there_is_one_picture(tmp_path):
    explain(lambda x: x.sin().exp().sum(), X).save(tmp_path / "report.html")
    page = drawn(tmp_path / "report.html")
    assert len(page["peaks"]) == len(page["fits"]) == 1


def test_the_slider_switches_the_policy(tmp_path):
    found = explain(loss, X, W1, W2, policies=[save_nothing, save_everything])
    by_memory = {"save_nothing": save_nothing, "as it is": None, "save_everything": save_everything}
    measured = {policy: each.now for policy, each in found.rows} | {None: found.now}
    found.save(tmp_path / "report.html")
    page = drawn(tmp_path / "report.html")
    assert len(page["switched"]) == 3
    for (label, policy), shown in zip(by_memory.items(), page["switched"], strict=True):
        now = measured[policy]
        size = format_bytes(now.peak + now.timeline.arguments)
        assert shown["title"] == f"{label}: at most {size}"
        assert shown["fits"][0].startswith("without remat: ")
        assert shown["fits"][1].startswith(f"{label}: {size}, fits an H200-141: yes, ")
        (row,) = shown["rows"]
        assert row.startswith(f"{label} {size} {format_bytes(now.kept_bytes)} ") and row.endswith("yes")


def test_the_frontier_of_a_function_without_regions():
    found = explain(lambda x: (x @ x.T).sin().exp().sum(), X, policies=True)
    policies = [policy for policy, _ in found.rows]
    assert policies[: len(BUILT_IN)] == list(BUILT_IN) and not found.now.regions
    # A budget that comes out like another policy is left out.
    kept = [each.kept_bytes for _, each in found.rows]
    assert (
        len(kept[len(BUILT_IN) :]) == len(set(kept[len(BUILT_IN) :])) and json.loads(found.to_json())["rows"]
    )
    with pytest.raises(RematError, match=r"explain\(.*kwargs=\{'policies': True\}"):
        explain(lambda x, policies: x.sin(), X, policies=True)


def test_no_text_of_the_users_ends_the_script(tmp_path):
    name = "</script><script>alert(1)//"
    found = explain(remat(lambda x: x.sin().exp(), name=name), X)
    found.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("</script>") == 3 and name not in text
    data = re.search(r'id="cockpit-data">(.*?)</script>', text, re.DOTALL)
    assert data is not None and name in json.loads(data[1])["words"]
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)


def test_modules_show_their_policies():
    model = apply(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), policy=save_names("h"), layers="0"
    )
    linear = "Linear(in_features=2, out_features=2, bias=True)"
    assert f"(0): remat({linear}, policy=save_names('h'))\n" in repr(model)
    assert repr(remat(torch.nn.ReLU())) == "remat(ReLU(), policy=save_nothing)"
    assert repr(remat(model.forward)).endswith(", policy=save_nothing)")
