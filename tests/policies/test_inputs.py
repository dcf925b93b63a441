"""Arguments of regions in host memory: what is sent, when, and what is freed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.multiprocessing.reductions import StorageWeakRef

import remat
from remat import RematError, presets, save_matmuls, save_nothing, saved_residuals
from tests.compiled import Graphs
from tests.helpers import LiveBytes, crossed, same, sparse
from tests.lanes import Late
from tests.policies.inside import transfer

LAYERS, WIDTH, TOKENS = 4, 512, 512
BYTES = TOKENS * WIDTH * 4


@pytest.fixture
def late(monkeypatch):
    return Late.installed(monkeypatch)


def layer(x, w):
    return x + torch.tanh(x * w).sin()


def model(region, x, ws):
    x = x * 2
    for w in ws:
        x = region(x, w)
    return x.square().sum()


def given(tokens=TOKENS, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH, dtype=dtype)
    return x, [torch.randn(WIDTH, dtype=dtype, requires_grad=True) for _ in range(LAYERS)]


HOST = remat.remat(layer, inputs="offload")


def as_backward(region, x, ws):
    return torch.autograd.grad(model(region, x.clone().requires_grad_(), ws), ws)


def as_grad(region, x, ws):
    return grad(functools.partial(model, region, x.detach()))([w.detach() for w in ws])


def as_vmap(region, x, ws):
    return vmap(grad(functools.partial(model, region, x.detach())))(
        [torch.stack([w, w]).detach() for w in ws]
    )


def as_second(region, x, ws):
    first = torch.autograd.grad(model(region, x.clone().requires_grad_(), ws), ws, create_graph=True)
    return torch.autograd.grad(torch.stack(first).square().sum(), ws)


def as_nested(region, x, ws):
    return grad(lambda w: grad(lambda w: model(region, x.detach(), [w, *ws[1:]]))(w).square().sum())(
        ws[0].detach()
    )


def as_jvp(region, x, ws):
    return jvp(
        functools.partial(model, region, x.detach()), ([w.detach() for w in ws],), ([w.detach() for w in ws],)
    )


WAYS = [as_backward, as_grad, as_vmap, as_second, as_nested, as_jvp]


@pytest.mark.parametrize(("run", "policy"), crossed(WAYS, [save_nothing, save_matmuls], every=2))
def test_gradients(late, run, policy):
    x, ws = given(TOKENS)
    region = remat.remat(layer, inputs="offload", policy=policy)
    for _ in range(2):
        same(run(region, x, ws), run(layer, x, ws), 1e-4 if run in (as_second, as_nested) else 0.0)
    assert late.held() == set()


def test_all_but_the_last_are_sent_one_region_late_and_fetched_one_ahead(late):
    x, ws = given()
    for _ in range(2):
        loss = model(HOST, x.clone().requires_grad_(), ws)
        assert late.take() == [f"send {WIDTH}"] * (LAYERS - 1)
        loss.backward()
        fetch, use = f"fetch {WIDTH}", f"use {WIDTH}"
        assert late.take() == [fetch, fetch, use, fetch, use, use]
        assert late.most <= 2 and late.held() == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_freed_bytes_are_those_of_all_layers_but_one(late, dtype):
    x, ws = given(dtype=dtype)
    live = {}
    for region in (remat.remat(layer), HOST):
        with LiveBytes() as seen:
            loss = model(region, x.clone().requires_grad_(), ws)
            late.finish()
            live[region] = seen.bytes - sum(t.nbytes for ref in late.hosts if (t := ref()) is not None)
        del loss
    plain, host = live.values()
    assert plain - host == (LAYERS - 1) * TOKENS * WIDTH * dtype.itemsize


@pytest.mark.parametrize("part", [False, True])
def test_what_several_regions_are_given_is_sent_once(late, part):
    def with_memory(x, memory, w):
        return layer(x, w) + memory.sin() * w

    def run(region):
        x, ws = given()
        memory = x.repeat(1, 1 + part).requires_grad_()
        x, held = x.clone().requires_grad_() * 2, memory * 3
        for w in ws:
            x = region(x, held[:, :WIDTH] if part else held, w)
        loss = x.square().sum()
        sent = late.take()
        return sent, torch.autograd.grad(loss, [memory, *ws])

    sent, found = run(remat.remat(with_memory, inputs="offload"))
    # Inputs of all layers but the last, and the memory.
    assert sent == [f"send {WIDTH}"] * LAYERS
    same(found, run(with_memory)[1], 0.0)
    # What was written to since is another value.
    (x, ws), region = given(), remat.remat(with_memory, inputs="offload")
    held = x.clone().requires_grad_() * 3
    before = region(x.clone().requires_grad_() * 2, held, ws[0])
    with torch.no_grad():
        held.mul_(2)
    two = region(x.clone().requires_grad_() * 2, held, ws[0])
    late.finish()
    same(torch.autograd.grad(two.sum(), held)[0], held.cos() * ws[0], 1e-6)
    del before


def test_memory_goes_while_the_next_region_runs(late):
    x, ws = given()
    x = x.clone().requires_grad_() * 2
    gone = []
    for w in ws:
        gone.append(StorageWeakRef(x.untyped_storage()))
        x = HOST(x, w)
        late.finish()
        # The one of the region that has just run waits.
        assert [one.expired() for one in gone] == [True] * (len(gone) - 1) + [False]
    x.sum().backward()


def test_copies_in_flight_are_bounded(late):
    x, ws = given()
    loss = model(HOST, x.clone().requires_grad_(), [*ws, *ws])
    assert len(late.pending) <= transfer._queue.most
    loss.backward()


def test_small_arguments_leaves_and_tables_stay(late):
    x, ws = given(TOKENS // 2)  # half a MiB
    model(HOST, x.clone().requires_grad_(), ws).backward()
    big, (w, *_) = given()
    HOST(big.requires_grad_(), w).sum().backward()  # a leaf
    HOST(big.detach() * 2, w).sum().backward()  # without history
    assert late.take() == []


def test_what_is_reported(late):
    x, ws = given()
    found = saved_residuals(functools.partial(model, HOST), x.clone().requires_grad_(), ws)
    assert found.host_bytes == (LAYERS - 1) * BYTES
    assert [(r.bytes, r.host) for r in found if r.name] == [(BYTES, True)] * (LAYERS - 1) + [(BYTES, False)]
    assert HOST.__wrapped__ is layer


@pytest.mark.parametrize("sent", [False, True])
def test_written_between_the_passes(late, sent):
    x, ws = given()
    for _ in range(3):  # later calls follow the trace of the first
        given_to, other = (x.clone().requires_grad_() * 2 for _ in range(2))
        ys = [HOST(t, ws[0]) for t in (given_to, other)[: 1 + sent]]
        with torch.no_grad():
            given_to.zero_()
        with pytest.raises(RematError, match="written in place between its forward and its backward"):
            ys[0].sum().backward()


def test_modules_and_presets(late: Late):
    block = torch.nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    net = torch.nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    (net(x * 2).sum()).backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    custom = presets.custom({"decoder_layer_input": "offload", "*.linear1": "device"})
    ways: list[dict[str, Any]] = [{"inputs": "offload"}, {"policy": custom}]
    for options in ways:
        net.zero_grad()
        net.layers.requires_grad_()
        (remat.apply(net, **options)(x * 2).sum()).backward()
        assert late.take().count(f"send {WIDTH}") == 2
        same([p.grad for p in net.parameters()], expected, 1e-6)


def test_nested_regions(late):
    x, ws = given()
    inner = remat.remat(lambda x, w: HOST(HOST(x, w), w), inputs="offload")
    plain = lambda x, w: layer(layer(x, w), w)  # noqa: E731
    for _ in range(2):
        same(as_backward(inner, x, ws), as_backward(plain, x, ws), 0.0)
    assert late.held() == set()


def test_a_forward_that_fails_leaves_nothing(late):
    def fails(x, w):
        layer(x, w)
        raise ValueError("no")

    x, ws = given()
    y = HOST(x.clone().requires_grad_() * 2, ws[0])
    with pytest.raises(ValueError, match="no"):
        remat.remat(fails, inputs="offload")(y, ws[1])
    y.sum().backward()
    assert late.held() == set()


def test_a_host_without_room(late, monkeypatch):
    x, ws = given()
    region = HOST(x.clone().requires_grad_() * 2, ws[0])
    with monkeypatch.context() as patch:
        patch.setattr(
            late, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: out of memory"))
        )
        with pytest.raises(RematError, match=f"no room in host memory for {BYTES} bytes .* out of memory"):
            HOST(region, ws[1])
    # Nothing is lost: what was to be sent is where it was.
    torch.autograd.grad(region.sum(), ws[0])
    same(as_backward(HOST, x, ws), as_backward(layer, x, ws), 0.0)


@pytest.mark.parametrize("value", ["host", None, True])
def test_refused(value):
    with pytest.raises(ValueError, match="expected 'hold' or 'offload'"):
        remat.remat(layer, inputs=value)


# -- compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_inside", sparse([False, True]))
def test_a_graph_sends_all_but_the_last(made_inside):
    torch._dynamo.reset()
    x, ws = given()
    region = (lambda x, w: remat.remat(layer, inputs="offload")(x, w)) if made_inside else HOST
    compiled = Graphs(lambda ws: model(region, x * ws[0].sum(), ws))
    for _ in range(2):
        same(
            torch.autograd.grad(compiled(ws), ws),
            torch.autograd.grad(model(layer, x * ws[0].sum(), ws), ws),
            1e-5,
        )
    assert compiled.forward["send"] == LAYERS - 1
    assert compiled.backward["fetch"] == LAYERS - 1


@pytest.mark.slow
def test_inductor():
    torch._dynamo.reset()
    x, ws = given()
    compiled = torch.compile(lambda ws: model(HOST, x * ws[0].sum(), ws))
    same(
        torch.autograd.grad(compiled(ws), ws),
        torch.autograd.grad(model(layer, x * ws[0].sum(), ws), ws),
        1e-4,
    )


@pytest.mark.slow
def test_compiled_torch_func():
    torch._dynamo.reset()
    x, ws = given()
    ws = [w.detach() for w in ws]
    run = lambda region: grad(lambda ws: model(region, x * ws[0].sum(), ws))  # noqa: E731
    same(torch.compile(run(HOST), backend="aot_eager")(ws), run(layer)(ws), 1e-5)
