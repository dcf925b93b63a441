"""Weights that live elsewhere (ZeRO-3, offloaders, block swap).

Hooks or the function itself fetch them before a layer and drop them after, by `.data` or by resizing
storages. Hooks of the backward fetch them again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import remat as region_of, save_everything, save_matmuls, save_nothing, scan_remat
from tests.helpers import crossed, rand

POLICIES: dict[str, Any] = {
    "nothing": lambda: save_nothing,
    "matmuls": lambda: save_matmuls,
    "everything": lambda: save_everything,
    "budget": lambda: remat.checkpoint_policy(budget="free"),
}


def by_data(home, tensors):
    """Other memory each time; what is dropped is memory that others use now."""

    def fetch():
        for t in tensors:
            t.data = home[t].clone()

    def drop():
        for t in tensors:
            t.data = torch.full_like(home[t], 3.0)

    return fetch, drop


def by_empty_data(home, tensors):
    def drop():
        for t in tensors:
            t.data = torch.empty(0)

    return by_data(home, tensors)[0], drop


def by_resizing(home, tensors):
    def fetch():
        for t in tensors:
            storage = t.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(home[t].untyped_storage().nbytes())
                t.data.copy_(home[t])

    def drop():
        for t in tensors:
            t.untyped_storage().resize_(0)

    return fetch, drop


def by_a_storage_of_old(home, tensors):
    """As the one before, by storages that the user has at hand: no torch function tells of them."""
    storages = {t: t.untyped_storage() for t in tensors}
    looks = {t: t.data for t in tensors}

    def fetch():
        for t in tensors:
            if storages[t].nbytes() == 0:
                storages[t].resize_(home[t].untyped_storage().nbytes())
                looks[t].copy_(home[t])

    def drop():
        for t in tensors:
            storages[t].resize_(0)

    return fetch, drop


class Pool:
    """One buffer for the layer that runs."""

    def __init__(self):
        self.memory = torch.zeros(64)

    def __call__(self, home, tensors):
        def fetch():
            first = 0
            for t in tensors:
                there = self.memory[first : first + home[t].numel()].view(home[t].shape)
                there.copy_(home[t])
                t.data, first = there, first + home[t].numel()

        def drop():
            for t in tensors:
                t.data = torch.empty(0)

        return fetch, drop


WAYS: dict[str, Any] = {
    "data": lambda: by_data,
    "empty data": lambda: by_empty_data,
    "resized": lambda: by_resizing,
    "resized unseen": lambda: by_a_storage_of_old,
    "pool": Pool,
}


def layers():
    torch.manual_seed(0)
    last = nn.Linear(3, 3, bias=False)
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Tanh(), last)


def streamed(model, way, buffers=False):
    """Hooks around every layer; an output's hook fetches for the backward."""
    home = {t: t.detach().clone() for t in (*model.parameters(), *model.buffers())}
    for layer in model:
        tensors = list(layer.parameters()) + (list(layer.buffers()) if buffers else [])
        fetch, drop = way(home, tensors)

        def after(layer, args, out, fetch=fetch, drop=drop):
            if out.requires_grad:
                out.register_hook(lambda g: fetch())
            drop()

        layer.register_forward_pre_hook(lambda layer, args, fetch=fetch: fetch())
        layer.register_forward_hook(after)
        drop()
    return model


X = torch.tensor([[-1.0, 0.2, 0.5], [0.3, 0.7, 2.0]])


def step(model, fn, times=2):
    """The gradients of weights and input in each of so many steps."""
    found = []
    for _ in range(times):
        x = X.clone().requires_grad_()
        fn(x).pow(3).sum().backward()
        found.append([x.grad, *[p.grad.clone() for p in model.parameters()]])
        for p in model.parameters():
            p.grad = None
    return found


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, POLICIES))
def test_hooks_of_layers(way, policy):
    model = streamed(layers(), WAYS[way]())
    want = step(model, model)
    model = streamed(layers(), WAYS[way]())
    got = step(model, region_of(model, policy=POLICIES[policy]()), times=3)
    torch.testing.assert_close(got, [*want, want[0]], rtol=0, atol=0)


@pytest.mark.parametrize("dead", [False, True], ids=["read", "dead"])
@pytest.mark.parametrize("way", ["data", "resized"])
def test_hooks_of_layers_in_regions_of_the_steps_of_a_scan(way, dead):
    """Regions inside hold what they read past torch functions, which is no read of the step's."""

    def found(region):
        model = streamed(layers(), WAYS[way]())

        def body(h, x):
            out = model(h)
            return h.sin() * 2 if dead else out * x

        def fn(x):
            inner = region(body)
            if region is region_of:
                return scan_remat(lambda h, _: (inner(h, x), None), x * 2, length=2)[0]
            return inner(inner(x * 2, x), x)

        fn = region(fn)
        for _ in range(2):
            x = X.clone().requires_grad_()
            yield from torch.autograd.grad(fn(x).square().sum(), [x, *model.parameters()], allow_unused=True)

    pairs = [(a, b) for a, b in zip(found(region_of), found(lambda fn: fn), strict=True) if b is not None]
    assert pairs
    for got, want in pairs:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, POLICIES))
def test_in_the_body_of_the_function(way, policy):
    """Without hooks: the function fetches and drops. The backward's fetch is a hook on its results."""

    def make():
        torch.manual_seed(0)
        w, v = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
        home = {t: t.detach().clone() for t in (w, v)}
        pairs = [WAYS[way]()(home, [t]) for t in (w, v)]
        for _, drop in pairs:
            drop()
        model = nn.ParameterList([w, v])

        def fn(x):
            for t, (fetch, drop) in zip((w, v), pairs, strict=True):
                fetch()
                x = (x @ t).sin()
                x.register_hook(lambda g, fetch=fetch: fetch())
                drop()
            return x

        return model, fn

    model, fn = make()
    want = step(model, fn)
    model, fn = make()
    got = step(model, region_of(fn, policy=POLICIES[policy]()), times=3)
    torch.testing.assert_close(got, [*want, want[0]], rtol=0, atol=0)


@pytest.mark.parametrize("way", ["data", "empty data", "resized", "pool"])
def test_hooks_of_the_backward_of_modules(way):
    """`register_full_backward_pre_hook` fetches; buffers are streamed, too."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            self.register_buffer("scale", torch.tensor([0.5, 2.0, -1.0]))

        def forward(self, x):
            return ((x @ self.weight) * self.scale).sin()

    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(), Scaled())
        home = {t: t.detach().clone() for t in (*model.parameters(), *model.buffers())}
        for layer in model:
            fetch, drop = WAYS[way]()(home, [*layer.parameters(), *layer.buffers()])
            layer.register_forward_pre_hook(lambda layer, args, fetch=fetch: fetch())  # pyright: ignore[reportCallIssue]
            layer.register_forward_hook(lambda layer, args, out, drop=drop: drop())
            layer.register_full_backward_pre_hook(lambda layer, g, fetch=fetch: fetch())
            drop()
        return step(model, wrap(model))

    torch.testing.assert_close(run(region_of), run(lambda fn: fn), rtol=0, atol=0)


class Sharded(nn.Module):
    """Weights in two halves, put together by hooks of layers where they are not there yet.

    In the backward they stay from the first fetch on, as ZeRO-3's do while a module's backward is under way.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.GELU())
        self.halves = {p: [half.clone() for half in p.detach().chunk(2)] for p in self.parameters()}
        self.backward_under_way = False
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, _: self.fetch(layer))
            layer.register_forward_hook(lambda layer, *_: self.drop(layer))
        self.drop(self)

    @torch.no_grad()
    def fetch(self, layer: nn.Module) -> None:
        for p in layer.parameters():
            if p.numel() == 0:
                whole = torch.empty(sum(len(half) for half in self.halves[p]), *self.halves[p][0].shape[1:])
                torch.cat(self.halves[p], out=whole)
                p.data = whole

    def drop(self, layer: nn.Module) -> None:
        for p in layer.parameters() if not self.backward_under_way else ():
            p.data = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sin()

    def step(self, call: Any, x: torch.Tensor, ahead: bool) -> list[torch.Tensor]:
        loss = call(x).square().sum()
        self.backward_under_way = True
        if ahead:
            self.fetch(self)
        found = torch.autograd.grad(loss, [x, *self.parameters()])
        self.backward_under_way = False
        self.drop(self)
        return list(found)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_are_there_in_the_backward_already(policy: str, ahead: bool) -> None:
    x = rand(3, 4, dtype=torch.float32).requires_grad_()
    plain, streamed = Sharded().layers, Sharded()
    for layer in plain:
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    for p, q in zip(plain.parameters(), streamed.parameters(), strict=True):
        p.data = torch.cat(streamed.halves[q])
    region = region_of(streamed.forward, policy=POLICIES[policy]())
    for seed in range(3):
        torch.manual_seed(seed)
        expected = torch.autograd.grad(plain(x).sin().square().sum(), [x, *plain.parameters()])
        torch.manual_seed(seed)
        found = streamed.step(region, x, ahead)
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_other_numbers_of_a_function_that_fetches_are_noticed() -> None:
    x, model, flag = rand(3, 4, dtype=torch.float32).requires_grad_(), Sharded(), [1.0]
    region = region_of(lambda x: model(x) * torch.full((), flag[0]))
    loss = region(x).sum()
    model.backward_under_way = True
    model.fetch(model)
    flag[0] = 2.0
    with pytest.raises(remat.RematError, match="does not repeat its forward"):
        loss.backward()


def test_a_write_to_what_is_read_beside_a_weight_of_two_memories_is_noticed() -> None:
    weight, scale = nn.Parameter(torch.ones(3)), torch.full((3,), 3.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        weight.data = torch.ones(3)
        x = (x * weight).sin()
        weight.data = torch.full((3,), 2.0)
        return ((x * weight).sin() * scale).sin()

    loss = region_of(fn)(torch.ones(3, requires_grad=True)).sum()
    scale.add_(1)
    with pytest.raises(remat.RematError, match="reads `scale`.*written in place between"):
        loss.backward()


@pytest.mark.parametrize("way", ["data", "resized"])
def test_a_plan_leaves_a_layer_the_gradient_of_a_call_before(way: str) -> None:
    """A weight of another device or dtype, if for a moment, has another end of its graph from then on."""
    x = X.clone().requires_grad_()

    def gradients(inner: Any, outer: Any) -> Any:
        model = streamed(layers(), WAYS[way]())
        before = model(x).exp()
        out = outer(lambda y: inner(lambda y: model(y).sin())(y))(before)
        return torch.autograd.grad(out.sum(), [x, *model.parameters()])

    for remembered in (lambda fn: fn, region_of):
        found = gradients(remembered, lambda fn: region_of(fn, policy=POLICIES["budget"]()))
        torch.testing.assert_close(found, gradients(lambda fn: fn, lambda fn: fn), rtol=0, atol=0)
