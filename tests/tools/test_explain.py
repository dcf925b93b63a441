"""explain, of one policy and of several: exact figures, true notes, and no trace left behind."""

import html.parser
import io
import re

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from remat import (
    RematError,
    checkpoint_name,
    checkpoint_policy,
    explain,
    offload,
    remat,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    saved_residuals,
    scan_remat,
)
from tests.helpers import OpCounter, rand
from tests.tools.inside import BUILT_IN, KINDS, kind

aten = torch.ops.aten
X, W1, W2 = rand(4, 8), rand(8, 16), rand(16, 8)
FLOAT = 8
MM = 2 * 4 * 8 * 16  # FLOPs of either product


def block(x, w1, w2):
    h = checkpoint_name(torch.tanh(x @ w1), "h")
    return x + torch.sin(h @ w2)


def loss(wrap, depth=3):
    def fn(x, w1, w2):
        for _ in range(depth):
            x = wrap(block)(x, w1, w2)
        return x.square().sum()

    return fn


def work(measured, when, kind):
    found = measured.work.get((when, kind))
    return (found.ops, found.flops, found.bytes) if found else (0, 0, 0)


def test_figures_of_one_region_are_exact():
    found = explain(remat(block), X, W1, W2)
    # x, w1 and w2 are held; what is computed again: h with its product, and the product that sin's derivative
    # reads.
    assert (found.kept_bytes, found.held_bytes) == (0, FLOAT * (4 * 8 + 2 * 8 * 16))
    assert found.plain_bytes == FLOAT * (4 * 16 + 4 * 8)
    assert [(r.op, r.work.ops, r.work.flops) for r in found.now.recomputed] == [
        ("aten.mm.default", 1, MM),
        ("aten.mm.default", 1, MM),
        ("aten.tanh.default", 1, 0),
    ]
    operands = FLOAT * (4 * 8 + 8 * 16 + 4 * 16)
    assert work(found.now, "forward", "matmul") == (2, 2 * MM, 2 * operands)
    assert work(found.now, "recompute", "matmul") == (2, 2 * MM, 2 * operands)
    assert work(found.now, "backward", "matmul") == (4, 4 * MM, 4 * operands)
    assert work(found.now, "forward", "pointwise") == (3, 0, FLOAT * (2 * 64 + 2 * 32 + 3 * 32))
    assert found.recomputed == found.now.total("recompute") and found.recomputed.ops == 3
    assert found.plain.total("recompute").ops == 0
    (region,) = found.now.regions
    assert (region.name, region.calls, region.forward.ops, region.recomputed.ops) == ("block", 1, 5, 3)
    assert (region.saved, region.inputs, region.share) == (0, found.held_bytes, 1.0)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_names("h")], ids=repr)
def test_figures_agree_with_other_ways_of_counting(policy):
    fn = loss(lambda f: remat(f, policy=policy))
    found = explain(fn, X, W1, W2)
    assert found.kept == saved_residuals(fn, X, W1, W2)
    assert found.plain.kept == saved_residuals(loss(lambda f: f), X, W1, W2)
    leaves = [t.clone().requires_grad_() for t in (X, W1, W2)]
    counts = []
    for f in (fn, loss(lambda f: f)):
        with OpCounter() as ops:
            f(*leaves).backward()
        counts.append((ops["tanh"], ops["mm"]))
    tanh, mm = (a - b for a, b in zip(*counts, strict=True))
    again = {r.op: r.work.ops for r in found.now.recomputed}
    assert again.get("aten.tanh.default", 0) == tanh
    assert sum(r.work.ops for r in found.now.recomputed if "mm" in r.op) == mm
    saved = sum(r.bytes for r in found.kept if r.why == "policy")
    assert found.now.regions[0].saved == saved


def test_several_and_nested_regions():
    inner = remat(lambda x: x.sin().exp(), name="inner")
    outer = remat(lambda x, w: inner(x @ w).tanh(), name="outer")
    found = explain(lambda x, w: outer(inner(x), w).sum(), rand(4, 4), rand(4, 4))
    regions = {r.name: r for r in found.now.regions}
    assert regions["inner"].calls == 1 and regions["outer"].calls == 1
    assert regions["outer"].holds_regions and not regions["inner"].holds_regions
    # Once for itself; inside the outer one twice: with the outer's recomputation and with its own.
    assert regions["inner"].forward.ops == 4
    assert {r.region for r in found.now.recomputed} == {"inner", "outer"}
    assert not any("whole differentiated function" in note for note in found.notes)


def test_derivatives_inside_the_function():
    def step(w, x):
        return grad(lambda w: remat(lambda w: torch.tanh(x @ w))(w).sum())(w)

    found = explain(step, W1, X)
    # The gradient that the function takes is a backward already.
    assert work(found.now, "forward", "matmul")[0] == 1
    assert work(found.now, "recompute", "matmul")[0] >= 1
    assert work(found.now, "backward", "matmul")[0] >= 2
    per_example = explain(vmap(remat(block), (0, None, None)), X, W1, W2)
    assert per_example.kept_bytes == explain(remat(block), X, W1, W2).kept_bytes


def test_scans_are_looked_into():
    def run(w, xs):
        return scan_remat(lambda h, x: ((h @ w + x).tanh(), None), xs[0], xs, checkpoints=2)[0].sum()

    assert explain(run, rand(3, 3), rand(6, 3)).kept_bytes > 0


# -- notes --------------------------------------------------------------------------------------------


def noted(fn, *args):
    return " ".join(explain(fn, *args).notes)


def test_notes_say_when_a_remat_cannot_help():
    assert "nothing is recomputed: wrap the parts" in noted(loss(lambda f: f), X, W1, W2)
    assert "nothing is recomputed" in noted(remat(block, policy=save_everything), X, W1, W2)
    assert "is the whole differentiated function" in noted(remat(loss(lambda f: f)), X, W1, W2)
    assert "keep as much as no remat does" in noted(remat(torch.square), X)
    assert "recomputes nothing" in noted(remat(torch.square), X)
    assert "is the whole" not in noted(loss(remat), X, W1, W2)


def test_notes_say_what_defeats_a_region():
    inner = remat(lambda x: x.sin().exp(), name="inner")
    outer = remat(lambda x, w: inner(x @ w).tanh(), name="outer")
    assert "region 'inner' is called inside 'outer' alone" in noted(outer, rand(4, 4), rand(4, 4))
    assert "Try: one region in place of two" in noted(outer, rand(4, 4), rand(4, 4))
    roomy = remat(lambda x: x.sin().exp().sin(), policy=checkpoint_policy(budget="1GiB"))
    assert "is as much as it needs" in noted(lambda x: roomy(x).sum(), X)


def test_no_note_where_a_remat_helps():
    x, w1, w2 = rand(256, 8), rand(8, 16), rand(16, 8)
    assert noted(loss(remat, depth=6), x, w1, w2) == ""


def test_what_is_offloaded_is_told_apart():
    x = rand(64, 8)
    h, product = FLOAT * 64 * 16, FLOAT * 64 * 8
    saved, away = (explain(remat(block, policy=p), x, W1, W2) for p in (save_matmuls, offload(save_matmuls)))
    assert away.host_bytes == h + product and saved.host_bytes == 0
    assert away.kept_bytes == saved.kept_bytes - away.host_bytes == 0
    assert away.held_bytes == saved.held_bytes == FLOAT * (64 * 8 + 2 * 8 * 16)
    assert away.plain_bytes == saved.plain_bytes
    assert [(r.why, r.host, r.bytes) for r in away.kept if r.host] == [
        ("policy", True, h),
        ("policy", True, product),
    ]
    # The same ops run again, no more; beside them each value travels once each way.
    assert away.now.recomputed == saved.now.recomputed
    assert all(away.now.total(when) == saved.now.total(when) for when in ("forward", "recompute", "backward"))
    assert (
        work(away.now, "forward", "transfer") == work(away.now, "backward", "transfer") == (2, 0, h + product)
    )
    (region,) = away.now.regions
    assert (region.saved, region.offloaded, region.forward.ops) == (0, h + product, 5)
    assert (region.share, saved.now.regions[0].share) == (1.0, 1.0)
    peaks = [
        explain(loss(lambda f, p=p: remat(f, policy=p)), x, W1, W2).now.peak
        for p in (save_nothing, offload(save_matmuls), save_matmuls)
    ]
    assert sorted(peaks) == peaks and len(set(peaks)) == 3
    # It does help: of a matmul that is kept where it is the opposite is said.
    assert not any("as much as no remat" in note for note in away.notes)
    assert any(
        "as much as no remat" in note for note in explain(remat(block, policy=save_matmuls), X, W1, W2).notes
    )
    text = str(away).splitlines()
    assert (
        text[0]
        == "block keeps 0 B of 12.0 KiB without remat (0%) for its backward, and 12.0 KiB in host memory"
    )
    assert "0 B kept, 6.0 KiB held, 12.0 KiB offloaded" in text
    assert sum("offloaded by policy" in line for line in text) == 2
    assert ["to", "the", "host", "and", "back", *["12.0", "KiB"] * 2] in [line.split() for line in text]
    table = explain(block, x, W1, W2, policies=[save_matmuls, offload(save_matmuls)])
    assert "  offload(save_matmuls)       0 B     0%   12.0 KiB  6.0 KiB" in str(table)
    assert str(saved.kept).endswith("12.0 KiB kept, 6.0 KiB held, in 5 tensors")
    assert str(away.kept).endswith("0 B kept, 6.0 KiB held, 12.0 KiB offloaded, in 5 tensors")


# -- nothing is left behind ---------------------------------------------------------------------------


def test_functions_of_cython_may_be_in_reach():
    draws = [np.random.set_state, np.random.RandomState.set_state]
    assert explain(lambda x: draws and remat(torch.sin)(x), X).held_bytes


def test_errors():
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: x / (1 // 0), X)
    with pytest.raises(RematError, match="no backward to look at"):
        explain(torch.argmax, X)
    with pytest.raises(RematError, match="outside of torch.func"):
        grad(lambda x: explain(remat(torch.sin), x) and x.sum())(X)
    with pytest.raises(RematError, match="at least one policy"):
        explain(block, X, W1, W2, policies=[])
    assert explain(remat(block), X, W1, W2).recomputed.ops == 3


def test_kinds():
    known = {
        "matmul": [aten.mm.default, aten.bmm.default, aten.addmm.default],
        "convolution": [aten.convolution.default, aten.convolution_backward.default],
        "attention": [aten._scaled_dot_product_flash_attention.default],
        "normalization": [aten.native_layer_norm.default, aten._softmax_backward_data.default],
        "pointwise": [aten.sin.default, aten.gelu_backward.default],
        "reduction": [aten.sum.default],
        "other": [aten.embedding.default, aten.cat.default],
    }
    for expected, ops in known.items():
        assert expected in KINDS and {kind(op) for op in ops} == {expected}


# -- how it looks -------------------------------------------------------------------------------------


NOTE = """\
note: region 'block' is the whole differentiated function: its recomputation brings back everything at once,
      so the peak is 3.0 KiB against 3.0 KiB without remat. Wrap its parts, such as each block (as one of
      several regions of something larger it helps)
""".splitlines()


def test_text():
    first = block.__code__.co_firstlineno + 1
    assert str(explain(remat(block, policy=[aten.tanh.default]), X, W1, W2)).splitlines() == [
        "block keeps 512 B of 768 B without remat (67%) for its backward",
        "arguments and weights that the backward reads: 2.2 KiB",
        "peak: 3.0 KiB, 3.0 KiB without remat",
        "FLOPs: 2.05 K forward, 1.02 K recomputed (+17%), 4.1 K backward",
        "",
        "512 B kept, 2.2 KiB held",
        "    bytes  times  why              each       from",
        "  1.0 KiB         argument         f64[8,16]  w1",
        "  1.0 KiB         argument         f64[16,8]  w2",
        f"    512 B         saved by policy  f64[4,16]  'h', aten.tanh at test_explain.py:{first} (block)",
        "    256 B         argument         f64[4,8]   x",
        "",
        "recomputed: 1 ops, 1.02 K FLOPs, 1.8 KiB moved",
        "  times   FLOPs    moved  op       from",
        f"      1  1.02 K  1.8 KiB  aten.mm  test_explain.py:{first + 1} (block)",
        "",
        "FLOPs, and bytes moved",
        "  class of ops  FLOPs forward  recomputed  backward  bytes forward  recomputed  backward",
        "  matmul               2.05 K      1.02 K     4.1 K        3.5 KiB     1.8 KiB   7.0 KiB",
        "  pointwise                                                2.2 KiB               3.5 KiB",
        "  all                  2.05 K      1.02 K     4.1 K        5.8 KiB     1.8 KiB  10.5 KiB",
        "",
        "regions",
        "  region  calls  ops  recomputed ops  recomputed FLOPs  saved by policy     held",
        "  block       1    5               1            1.02 K            512 B  2.2 KiB",
        "",
        *NOTE,
    ]


def test_long_tables_are_cut_in_text_alone():
    weights = [rand(2, 2, seed=i) for i in range(40)]

    def fn(ws):
        return torch.stack([w.sin() for w in ws]).sum()

    found = explain(fn, weights)
    assert "... and 20 more" in str(found) and "ws[39]" not in str(found)
    assert "ws[39]" in found._repr_html_()


class Balanced(html.parser.HTMLParser):
    """Checks that tags close in order; counts rows."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.decl = [], 0, ""

    def handle_decl(self, decl):
        self.decl = decl

    def handle_starttag(self, tag, attrs):
        self.rows += tag == "tr"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html(tmp_path):
    found = explain(remat(lambda x: x.sin().exp(), name="<b>&"), X)
    found.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    parser = Balanced()
    parser.feed(text)
    assert not parser.open and parser.rows == sum(1 + len(t.rows) for t in found.page().tables)
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text
    # Nothing is fetched from elsewhere; styles stand in the head.
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    head, _, body = text.partition("</head>")
    assert "<style>" in head and "<style" not in body and parser.decl == "doctype html"
    shown = found._repr_html_()
    assert shown.partition("</style>")[2] in body
    # A notebook's own page is left as it is.
    rules = re.findall(r"([^{}]+){", shown.partition("</style>")[0].removeprefix("<style>"))
    assert all(part.strip().startswith(".remat ") for rule in rules for part in rule.split(","))


def test_rich():
    console = pytest.importorskip("rich.console").Console(width=100, file=io.StringIO())
    console.print(explain(remat(block), X, W1, W2))
    shown = console.file.getvalue()
    assert "recomputed: 3 ops" in shown and "f64[8,16]" in shown and "note: region 'block'" in shown


# -- policies -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [remat, lambda f: remat(f, policy=save_everything)])
def test_policies_are_put_in_the_place_of_those_inside(wrap):
    fn = loss(wrap)
    policies = [save_nothing, save_matmuls, save_names("h"), save_everything]
    found = explain(fn, X, W1, W2, policies=policies)
    for policy in policies:
        alone = explain(loss(lambda f, policy=policy: remat(f, policy=policy)), X, W1, W2)
        assert found[policy].kept_bytes == alone.kept_bytes
        assert found[policy].recomputed == alone.recomputed
    assert [policy for policy, _ in found.rows] == policies
    assert found.plain.kept.kept_bytes == found[save_everything].kept_bytes


def test_policies_make_a_region_of_a_function_without_one():
    found = explain(block, X, W1, W2, policies=[save_nothing, [aten.tanh.default]])
    assert [each.recomputed.ops for _, each in found.rows] == [3, 1]
    assert found[save_nothing].kept_bytes == explain(remat(block), X, W1, W2).kept_bytes
    assert len(explain(block, X, W1, W2, policies=BUILT_IN).rows) == 6


def test_they_leave_policies_as_they_were():
    fn = remat(block, policy=save_matmuls)
    before = explain(fn, X, W1, W2).kept_bytes
    explain(fn, X, W1, W2, policies=True)
    with pytest.raises(ZeroDivisionError):
        explain(remat(lambda x: x / (1 // 0)), X, policies=True)
    assert explain(fn, X, W1, W2).kept_bytes == before


def test_comparison_prints_a_row_each():
    lines = str(explain(block, X, W1, W2, policies=[save_nothing, save_everything])).splitlines()
    assert lines[0] == "block under 2 policies"
    assert [line.split()[0] for line in lines[3:]] == ["policy", "no", "save_nothing", "save_everything"]
    assert re.search(r"save_nothing +0 B +0% +2.2 KiB +\S+ KiB +3 +2.05 K +\+33%", lines[5])
    assert re.search(r"save_everything +768 B +100% .* 0 +0 +\+0%", lines[6])
