"""Third derivatives of scans, of which forward mode is a part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import remat, scan_remat, while_remat
from tests.helpers import crossed, rand, sparse

A, W, X = rand(3, 3, seed=1), rand(3, seed=2) + 0.5, rand(2, 3, seed=3)


def along(fn, x):
    return jvp(fn, (x,), (x.cos(),))[1]


WAYS = {
    "jvp of hessian": lambda f, x: along(hessian(f), x),
    "jvp of jacfwd of grad": lambda f, x: along(jacfwd(grad(f)), x),
    "jacfwd of jacfwd of grad": lambda f, x: jacfwd(jacfwd(grad(f)))(x),
    "jvp of vmap of jvp of grad": lambda f, x: along(
        lambda x: vmap(lambda v: jvp(grad(f), (x,), (v,))[1])(torch.eye(3).double()), x
    ),
    "jvp of jvp of jacrev": lambda f, x: along(lambda x: along(jacrev(f), x), x),
    "grad of hessian": lambda f, x: grad(lambda x: hessian(f)(x).square().sum())(x),
    "grad of jvp of grad": lambda f, x: grad(lambda x: along(grad(f), x).square().sum())(x),
}


def looped(step, x):
    return step(step(x))


def scanned(step, x):
    return scan_remat(lambda c, _: (step(c), None), x, length=2, checkpoints=1)[0]


def while_scanned(step, x):
    further = lambda c: (step(c[0]), c[1] + 1)  # noqa: E731
    return while_remat(lambda c: c[1] < 2, further, (x, torch.tensor(0)), checkpoints=1, max_steps=3)[0]


LOOPS = {
    "scan": scanned,
    "loop": while_scanned,
    "regions in a scan": lambda step, x: scanned(remat(step), x),
    "scan in a region": lambda step, x: remat(lambda x: scanned(step, x))(x),
}
# Steps, made of what is differentiated.
STEPS = {
    "sine": lambda x: lambda c: (c @ A).sin(),
    "captured": lambda x: lambda c: (c @ A).tanh() * x,
    "softmax": lambda x: lambda c: c.softmax(-1) * W,
    # Of the carry nothing comes to the result: torch has zeros without memory for its tangents.
    "norm of what is captured": lambda x: lambda c: F.layer_norm(x, (3,), W),
    "batch norm": lambda x: lambda c: F.batch_norm(x, None, None, W, W, True),
}


@pytest.mark.parametrize(("way", "loop", "step"), sparse(crossed(WAYS, LOOPS, STEPS, every=2)))
def test_it_is_that_of_the_loop(way, loop, step):
    def loss(loop):
        return lambda x: (loop(STEPS[step](X * x), X * x).sin() * X).sum()

    x, run = rand(3, seed=4), WAYS[way]
    torch.testing.assert_close(run(loss(LOOPS[loop]), x), run(loss(looped), x))
