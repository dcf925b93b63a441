"""Transforms inside a region that are handed captured tensors; and runs that begin again when one is met."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

from remat import remat, save_matmuls, scan_remat
from tests.helpers import crossed, rand, same


@pytest.mark.parametrize(
    ("around", "inside", "policy", "nested"),
    crossed(["autograd", "vmap"], ["transform", "ops"], [None, save_matmuls], [False, True]),
)
def test_a_run_that_begins_again_has_written_nothing(around, inside, policy, nested):
    """A captured tensor that no walk finds is met amid the run: buffers, queues and slots count it once."""

    def steps(make):
        module: Any = torch.nn.Module()
        module.register_buffer("count", torch.zeros(()))
        module.register_buffer("last", torch.zeros(()))
        queue, w = torch.zeros(4), rand(3, seed=2).requires_grad_()
        hidden, own = iter([w * 3] * 200), torch.Generator().manual_seed(3)

        def fn(x):
            module.count += 1
            module.last = module.count * 2  # another tensor in the slot
            queue[1:3].add_(module.count)
            torch.relu_(queue.view(2, 2)[0])
            z = next(hidden)
            back = grad(lambda a: (a.sin() * z.detach() / module.count).sum())
            y = back(x) if inside == "transform" else x.cos()
            # (`vmap` is asked nothing about generators here.)
            noise = torch.rand(3, generator=own, dtype=x.dtype) if around == "autograd" else 1
            return y * z * module.count + queue.sum() + module.last + x * noise

        region = make(fn)
        around_it = make(lambda x: region(x) * module.count) if nested else region
        x, found = rand(3).requires_grad_(), []
        for _ in range(3):
            if around == "vmap":
                out = vmap(lambda x: around_it(x).sum())(torch.stack([x, x]))
            else:
                out = around_it(x)
                found += torch.autograd.grad(out.sum(), (x, w), retain_graph=True)
            found += [out.detach(), module.count.clone(), module.last.clone(), queue.clone()]
            found.append(own.get_state())
        return found

    same(steps(lambda f: remat(f, policy=policy)), steps(lambda f: f))


@pytest.mark.parametrize("place", ["attribute", "container", "tracker", "default"])
@pytest.mark.parametrize("around", ["autograd", "grad"])
def test_a_seed_set_inside_beside_a_transform(around, place):
    """Broken off after the first draw: what a generator was before the seed is what it begins again with."""

    def stream(make):
        generator = torch.default_generator if place == "default" else torch.Generator()
        holder: Any = torch.nn.Module()
        holder._generator = generator if place in ("attribute", "default") else None
        holder._streams = {"noise": [generator]} if place == "container" else {}
        holder._tracker = SimpleNamespace(streams={"noise": generator} if place == "tracker" else {})

        def region(x):
            own = holder._generator or (holder._streams or holder._tracker.streams)["noise"]
            own = own[0] if isinstance(own, list) else own
            before = own.get_state()
            own.manual_seed(3)
            mask = torch.rand(3, generator=own, dtype=x.dtype)
            own.set_state(before)
            noise = torch.rand(3, generator=own, dtype=x.dtype)
            return (x * mask + noise).sum() * grad(lambda a: a.sin().sum())(x).sum()

        f, found = make(region), []
        generator.manual_seed(7)
        for _ in range(2):
            x = rand(3).requires_grad_()
            found.append(grad(f)(x.detach()) if around == "grad" else torch.autograd.grad(f(x), x)[0])
            found.append(generator.get_state())
        return found

    same(stream(remat), stream(lambda f: f))


def test_vmap_over_a_leaf_that_no_walk_finds_writes_and_draws_once():
    """Nothing is recomputed in the call that tells of the leaf."""

    def steps(make):
        module: Any = torch.nn.Module()
        w = rand(3, seed=2).requires_grad_()
        hidden, own = iter([w * 3] * 9), torch.Generator().manual_seed(3)
        module.register_buffer("count", torch.zeros(()))

        def fn(x):
            module.count += 1
            return x.sin() * next(hidden) * torch.rand(3, generator=own, dtype=x.dtype)

        region, found = make(fn), []
        for _ in range(2):
            out = vmap(region, randomness="same")(rand(2, 3))
            found += [
                out.detach(),
                *torch.autograd.grad(out.sum(), w, retain_graph=True),
                module.count.clone(),
                own.get_state(),
            ]
        return found

    same(steps(remat), steps(lambda f: f))


def test_a_scan_that_begins_again_draws_from_an_own_generator_once():
    def drawn(scan):
        w, own = rand(3, seed=1).requires_grad_(), torch.Generator().manual_seed(5)
        hidden = iter([w * 2] * 50)
        out = scan(lambda c: (c * torch.rand(3, generator=own) * next(hidden)).sin(), rand(3))
        return out.detach(), own.get_state()

    def scanned(step, x):
        return scan_remat(lambda c, _: (step(c), None), x, length=3)[0]

    same(drawn(scanned), drawn(lambda step, x: step(step(step(x)))))


def test_what_a_region_inside_has_begun_is_no_part_of_the_one_around():
    """Its transform refuses the hooks of a first run; a recomputation knows that, and makes no first run."""

    def run(remat):
        def forces(b):
            return grad(lambda a: a.tanh().sum())(b.sin() * x) * b

        x, y = rand(3), rand(2, 3)
        region = remat(lambda y: remat(forces)(y) * x, policy=save_matmuls)
        return vmap(grad(lambda y: region(y).sum()))(y)

    same(run(remat), run(lambda f, policy=None: f))


def scanned(f: Any, length: int = 2) -> Any:
    return lambda x: scan_remat(lambda c, _: (f(c), None), x, length=length)[0]


@pytest.mark.parametrize("inside", [remat, lambda f: f], ids=["region", "plain"])
def test_a_step_of_a_scan_may_store_its_result(inside):
    def steps(scan):
        module, found = torch.nn.Linear(3, 3).double(), list[Any]()
        module.weight.data.copy_(rand(3, 3, seed=1))

        def step(a):
            module.last = (a @ module.weight).tanh()
            return module.last * 2

        for _ in range(3):
            x = rand(2, 3).requires_grad_()
            (first,) = torch.autograd.grad(scan(inside(step), x).square().sum(), x, create_graph=True)
            found += [first, *torch.autograd.grad(first.square().sum(), (x, module.weight))]
        return found

    same(steps(lambda f, x: scanned(f, 3)(x)), steps(lambda f, x: f(f(f(x)))))


@pytest.mark.parametrize("around", ["region", "scan"])
def test_a_hidden_tensor_of_a_level_that_is_gone_is_met_in_a_scan_inside(around):
    """`jacrev` pulls back when its level is gone; the scan inside took the tensor for a constant."""

    def jacobians(outer, inner):
        def of(w, x):
            hidden = iter([w * 2] * 500)
            return outer(lambda a: inner(lambda b: (b * next(hidden)).sin())(a) * 2)(x)

        return jacrev(of, (0, 1))(rand(3), rand(3, seed=1))

    def twice(f):
        return lambda x: f(f(x))

    ours = jacobians(remat if around == "region" else scanned, scanned)
    same(ours, jacobians(twice if around == "scan" else lambda f: f, twice))


@pytest.mark.parametrize("before", ["under hooks", "on another thread"])
def test_regions_inside_leave_the_way_for_a_transform(before):
    """What runs in between must not have the next transform refused: the function would run twice."""
    runs = [0]

    def part(x: torch.Tensor) -> torch.Tensor:
        if before == "under hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return remat(torch.sin)(x)
        y = rand(3, seed=2).requires_grad_()
        thread = threading.Thread(target=lambda: remat(torch.sin)(y).sum().backward())
        thread.start()
        thread.join()
        return x.sin()

    def f(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        out = part(x) * torch.rand_like(x)
        return grad(lambda x: (x.sin() * x).sum())(x) * out

    def step(fn: Any) -> Any:
        torch.manual_seed(0)
        x = rand(3).requires_grad_()
        out = fn(x)
        return out, runs[0], torch.get_rng_state(), torch.autograd.grad(out.sum(), x)

    expected, runs[0] = step(f), 0
    same(step(remat(f)), expected)
