"""Transforms inside a region that are handed captured tensors; and runs that begin again when one is met."""

import threading
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


def scanned(f: Any, length: int = 2) -> Any:
    return lambda x: scan_remat(lambda c, _: (f(c), None), x, length=length)[0]


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


def test_a_scan_that_begins_again_draws_from_an_own_generator_once():
    def drawn(scan):
        w, own = rand(3, seed=1).requires_grad_(), torch.Generator().manual_seed(5)
        hidden = iter([w * 2] * 50)
        out = scan(lambda c: (c * torch.rand(3, generator=own) * next(hidden)).sin(), rand(3))
        return out.detach(), own.get_state()

    def scanned(step, x):
        return scan_remat(lambda c, _: (step(c), None), x, length=3)[0]

    same(drawn(scanned), drawn(lambda step, x: step(step(step(x)))))


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
