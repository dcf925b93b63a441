"""The cockpit in a real browser: Chromium draws it, the slider moves it, and it asks for nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
import torch

from remat import checkpoint_name, explain, remat, save_everything, save_names, save_nothing
from tests.helpers import rand
from tests.tools import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None, reason=f"no browser: none of {', '.join(chromium.NAMES)} is installed"
    ),
]


def block(x, w):
    return x + checkpoint_name(torch.tanh(x @ w), "h").sin() @ w.T


def loss(x, w):
    for _ in range(3):
        x = remat(block, policy=save_names("h"))(x, w)
    return x.square().sum()


def seen(path):
    driven = chromium.with_script(path, Path(__file__).with_name("cockpit_drive.js").read_text())
    page = chromium.run(driven, "--dump-dom", "--window-size=1100,900")
    found = re.search(r'<pre id="seen">(.*?)</pre>', page, re.DOTALL)
    assert found, "a script of the page ended in an error"
    return json.loads(html.unescape(found[1]))


def test_the_slider_in_a_browser(tmp_path):
    explain(loss, rand(4, 8), rand(8, 16), policies=[save_nothing, save_everything]).save(
        tmp_path / "report.html"
    )
    page = seen(tmp_path / "report.html")
    assert page["start"]["chosen"] == ["as it is"] and len(page["start"]["titles"]) == 2
    labels = ["save_nothing", "as it is", "save_everything"]
    for label, shown in zip(labels, page["switched"], strict=True):
        assert shown["chosen"] == [label] == [shown["value"]]
        assert shown["titles"][1].startswith(f"{label}: at most ")
        assert shown["titles"][0] == page["start"]["titles"][0]
        assert shown["fits"][1].startswith(f"{label}: ") and "fits an H100-80: yes" in shown["fits"][1]
        # The chosen point, the others, and the step without remat.
        assert {"#d55e00", "#0072b2", "#1c1c1c"} <= set(shown["map"])
    assert page["pressed"] == ["save_nothing"] and page["pinned"].startswith("save_nothing: op ")
    # Autograd's values are in the first picture; inputs of regions and what runs again in the second.
    assert "#e69f00" in page["charts"][0] and {"#56b4e9", "#cc79a7"} <= set(page["charts"][1])
    assert page["asked"] == [] and page["wide"]


def test_a_page_without_a_frontier_in_a_browser(tmp_path):
    explain(lambda x: x.sin().exp().sum(), rand(4, 8)).save(tmp_path / "report.html")
    page = seen(tmp_path / "report.html")
    assert not page["switched"] and len(page["start"]["fits"]) == 1 and page["asked"] == []
