"""Factorizations, solves, matrix functions, FFTs and recurrent layers have a price in every plan."""

import math
import warnings

import pytest
import torch
from torch import nn

from remat import OpInfo, checkpoint_policy, explain, remat
from tests.helpers import OpCounter, Watched, rand
from tests.inside import describe

N = 32
X = rand(N, N).float()
EYE = N * torch.eye(N)
L = torch.linalg
aten = torch.ops.aten


def backward_ops(fn, x):
    out = fn(x)
    with OpCounter() as ops:
        out.sum().backward()
    return ops.counts


def flops_of(fn, *args):
    """By the names of the ops that run."""
    found = {}

    def look(op, args, kwargs, out):
        outs = out if isinstance(out, tuple) else (out,)
        found[op._schema.name.removeprefix("aten::")] = OpInfo(
            op, describe(args), describe(kwargs), describe(outs)
        ).flops

    with torch.no_grad(), Watched(look):
        fn(*args)
    return found


def again(fn, region, x):
    region(x).sum().backward()
    return backward_ops(region, x) - backward_ops(fn, x)


FREE = {
    "svd": (lambda x: L.svd(x)[0].sin().square(), "_linalg_svd"),
    "eigh": (lambda x: L.eigh(x @ x.t() + EYE)[1].sin().square(), "_linalg_eigh"),
    "eig": (lambda x: L.eig(x)[0].abs().sin().square(), "linalg_eig"),
    "cholesky": (lambda x: L.cholesky(x @ x.t() + EYE).sin().square(), "linalg_cholesky_ex"),
    "inv": (lambda x: L.inv(x + EYE).sin().square(), "linalg_inv_ex"),
    "solve": (lambda x: L.solve(x + EYE, x.sin()).sin().square(), "_linalg_solve_ex"),
    "triangular": (
        lambda x: L.solve_triangular(x.triu() + EYE, x.sin(), upper=True).sin().square(),
        "linalg_solve_triangular",
    ),
    "qr": (lambda x: L.qr(x)[0].sin().square(), "linalg_qr"),
    "slogdet": (lambda x: L.slogdet(x)[1].sin().square(), "_linalg_slogdet"),
    "matrix_exp": (lambda x: torch.matrix_exp(x / 10).sin().square(), "linalg_matrix_exp"),
    "fft": (lambda x: torch.fft.fft2(x).abs().sin().square(), "_fft_r2c"),
    "cdist": (lambda x: torch.cdist(x, x.sin(), p=1.0).sin().square(), "_cdist_forward"),
}


@pytest.mark.parametrize("name", FREE)
def test_free_runs_no_factorization_again(name):
    fn, op = FREE[name]
    x = X.clone().requires_grad_()
    region = remat(fn, policy=checkpoint_policy(budget="free"))
    assert again(fn, region, x)[op] == 0
    (line,) = [line for line in str(explain(region, x)).splitlines() if line.startswith("FLOPs:")]
    assert " 0 recomputed" in line and " 0 forward" not in line


def test_a_budget_keeps_the_factorization_and_repeats_the_product():
    """Both with what they read do not fit; the product is the cheaper one by far."""
    x, w = X.clone().requires_grad_(), rand(N, N).float()

    def both(x):
        return (x @ w).sin().square() + L.svd(x)[0].sin().square()

    ops = again(both, remat(both, policy=checkpoint_policy(budget=0.61, cost="flops")), x)
    assert ops["_linalg_svd"] == 0


CTC = (
    rand(12, 2, 5).float().log_softmax(-1),
    torch.tensor([[1, 2, 3], [2, 1, 4]]),
    torch.tensor([12, 12]),
    torch.tensor([3, 3]),
)
COUNTS = {
    "cholesky": (lambda: L.cholesky(X @ X.t() + EYE), "linalg_cholesky_ex", N**3 / 3),
    "lu of a wide matrix": (lambda: L.lu_factor(X[:8]), "linalg_lu_factor_ex", N * 64 - 512 / 3),
    "solve of columns": (lambda: L.solve(X + EYE, X[:, :3]), "_linalg_solve_ex", 2 * N**3 / 3 + 6 * N**2),
    "triangular solve": (
        lambda: L.solve_triangular(EYE, X[:, :3], upper=True),
        "linalg_solve_triangular",
        3 * N**2,
    ),
    "qr": (lambda: L.qr(X), "linalg_qr", 8 * N**3 / 3),
    "svd, thin": (lambda: L.svd(X, full_matrices=False), "_linalg_svd", 22 * N**3),
    "a batch of svds": (
        lambda: L.svd(X.expand(3, N, N), full_matrices=False),
        "_linalg_svd",
        3 * 22 * N**3,
    ),
    "eigh": (lambda: L.eigh(X @ X.t()), "_linalg_eigh", 9 * N**3),
    "eig": (lambda: L.eig(X), "linalg_eig", 25 * N**3),
    "fft of complex rows": (lambda: torch.fft.fft(X + 0j), "_fft_c2c", 5 * N * N * math.log2(N)),
    "inverse to reals": (
        lambda: torch.fft.irfft(X[:, :17] + 0j, n=N),
        "_fft_c2r",
        2.5 * N * N * math.log2(N),
    ),
    "ctc": (lambda: nn.functional.ctc_loss(*CTC), "_ctc_loss", 7 * 12 * (2 * 6 + 2)),
    "scatter": (
        lambda: X.new_zeros(N).scatter_add(0, torch.zeros(7, dtype=torch.long), X[0]),
        "scatter_add",
        7,
    ),
    "rows added": (
        lambda: X.new_zeros(4, N).index_add(0, torch.tensor([0, 0, 1]), X[:3]),
        "index_add",
        3 * N,
    ),
    # (`svdvals` asks for vectors, too, where somebody looks.)
    "singular values": (lambda: aten._linalg_svd(X, False, False), "_linalg_svd", 8 / 3 * N**3),
    "of a tall matrix": (lambda: aten._linalg_svd(X.repeat(4, 1), False, False), "_linalg_svd", 10 * N**3),
    "a product in place": (lambda: X.new_zeros(N, N).addmm_(X, X), "addmm_", 2 * N**3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_flops_are_the_standard_counts(name):
    fn, op, expected = COUNTS[name]
    assert flops_of(fn)[op] == int(expected)


def meta(*shape):
    return describe(torch.empty(shape, device="meta"))


def test_recurrent_layers_by_their_weights():
    x = rand(6, 2, 8).float()
    weights = 4 * 4 * 8 + 4 * 4 * 4
    assert flops_of(nn.LSTM(8, 4), x).get("mkldnn_rnn_layer", 2 * 12 * weights) == 2 * 12 * weights
    w = [meta(16, 8), meta(16, 4), meta(16), meta(16)]
    for op in (aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default):
        times = 2 if "backward" in op._schema.name else 1
        assert OpInfo(op, (describe(x), w, 4), {}, ()).flops == times * 2 * 12 * weights


def test_an_op_of_unknown_cost_is_named_once_and_is_not_free():
    """`_trilinear` is an op of torch's own that no table has."""
    x = X.clone().requires_grad_()

    def fn(x):
        return aten._trilinear(x, x.sin(), x.cos(), [], [], [], [1]).sin().square()

    region = remat(fn, policy=checkpoint_policy(budget="free"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ops = again(fn, region, x)
    texts = [str(w.message) for w in said if "_trilinear" in str(w.message)]
    assert len(texts) == 1 and "register_op" in texts[0]
    assert ops["_trilinear"] == 0
