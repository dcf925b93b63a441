"""Plain forward mode (`forward_ad`, gradcheck, `linearize`) over regions, scans and their backward."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import grad, hessian, jvp, linearize

from remat import remat, scan_remat
from tests.helpers import POLICIES, crossed, rand, same, sparse

W, XS, X, T = rand(3, 3), rand(4, 3, seed=1), rand(3, seed=2), rand(3, seed=3)
C = rand(3, seed=4)


def step(h, x):
    return torch.tanh(h @ W + x)


def loop(h):
    for x in XS:
        h = step(h, x)
    return h


def scan(h):
    return scan_remat(lambda h, x: (step(h, x), None), h, XS)[0]


def dense(h):
    return torch.add(torch.tanh(h @ W), C, alpha=0.3).sin()


CASES = {
    "region": (remat(dense), dense),
    "selective": (remat(dense, policy=POLICIES["matmuls"]), dense),
    "part": (lambda h: remat(torch.tanh)(h @ W).sin(), lambda h: torch.tanh(h @ W).sin()),
    "nested": (remat(lambda h: remat(dense)(h) * h), lambda h: dense(h) * h),
    "scan": (scan, loop),
    "region of a scan": (remat(scan), loop),
    "scan of regions": (
        lambda h: scan_remat(lambda h, x: (remat(step)(h, x), None), h, XS)[0],
        loop,
    ),
}


def energy(f):
    return lambda h: f(h).square().sum()


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, T))).tangent


def over_reverse(f, create_graph=False):
    with forward_ad.dual_level():
        h = forward_ad.make_dual(X.clone().requires_grad_(), T)
        (got,) = torch.autograd.grad(energy(f)(h), h, create_graph=create_graph)
        return forward_ad.unpack_dual(got).tangent.detach()  # pyright: ignore[reportOptionalMemberAccess]


def reverse_over_forward(f):
    h = X.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(h, T))).tangent
        return torch.autograd.grad(tangent.square().sum(), h)  # pyright: ignore[reportOptionalMemberAccess]


def over_func(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(grad(energy(f))(forward_ad.make_dual(X, T))).tangent


RUNS = {
    "dual": dual,
    "over reverse": over_reverse,
    "over reverse with a graph": lambda f: over_reverse(f, create_graph=True),
    "reverse over forward": reverse_over_forward,
    "over torch.func": over_func,
    "linearize": lambda f: linearize(f, X)[1](T),
    "linearize of a gradient": lambda f: linearize(grad(energy(f)), X)[1](T),
    "jvp of a gradient": lambda f: jvp(grad(energy(f)), (X,), (T,))[1],
}


# torch.func.linearize itself warns.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(("run", "case"), crossed(RUNS, CASES, every=5))
def test_forward_mode(case, run):
    fn, plain = CASES[case]
    same(RUNS[run](fn), RUNS[run](plain))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("fn", sparse([F.silu, F.mish, F.gelu, F.hardswish]), ids=lambda fn: fn.__name__)
def test_ops_with_a_backward_for_more_derivatives(fn):
    """Torch has two for silu and mish. The quick one has no forward-mode derivative."""
    for run in ("linearize of a gradient", "jvp of a gradient"):
        same(RUNS[run](remat(lambda x: fn(x @ W).sin())), RUNS[run](lambda x: fn(x @ W).sin()))


# A derivative known to be zero, times a number, below a dispatch mode: torch alone ends the process.
ZERO = {
    "add": lambda x: torch.add(x.sin(), C, alpha=0.3),
    "add of a constant": lambda x: torch.add(C, x.sin(), alpha=0.3),
    "sub": lambda x: torch.sub(x.sin(), C, alpha=0.3),
    "rsub": lambda x: torch.rsub(x.sin(), C, alpha=0.3),
    "addcmul": lambda x: torch.addcmul(C, x.sin(), C, value=0.3),
    "addcdiv": lambda x: torch.addcdiv(C, x.sin(), C, value=0.3),
    "addmm": lambda x: torch.addmm(C, x.sin().expand(3, 3), W, alpha=0.3, beta=0.7),
    "addmv": lambda x: torch.addmv(C, W, x.sin(), alpha=0.3, beta=0.7),
    "baddbmm": lambda x: torch.baddbmm(C, x.sin().expand(1, 3, 3), W[None], alpha=0.3, beta=0.7),
    "lerp": lambda x: torch.lerp(x.sin(), C, 0.3),
}


@pytest.mark.parametrize("name", ZERO)
def test_constant_operand_with_a_number(name):
    f = energy(ZERO[name])
    for run in (
        lambda f: hessian(f)(X),
        lambda f: jvp(grad(f), (X,), (T,))[1],
        lambda f: torch.autograd.functional.hvp(f, X, T)[1],
        over_reverse,
    ):
        same(run(remat(f)), run(f))


def test_zeros_keep_their_values_below_a_mode():
    for kind in (torch.float32, torch.int64, torch.complex64):
        zero = torch._efficientzerotensor((3,), dtype=kind)  # pyright: ignore[reportPrivateImportUsage]
        for factor in (2, 0.5, 1j):
            want = torch.zeros(3, dtype=kind) * factor
            got = torch.ops.aten.mul.Scalar(zero, factor)
            assert got.dtype == want.dtype and torch.equal(got, want)
            assert torch.equal(torch.ops.aten.add.Scalar(zero, factor, 2), want + 2 * factor)
