"""FLOPs of factorizations, solves, matrix functions, FFTs, recurrent layers, distances and alignments.

`torch.utils.flop_counter` counts none of them. Each formula is the standard count of the real algorithm, to
leading order; sums and products count one each, and a batch counts as many times. Sources:

- Golub and Van Loan, Matrix Computations, 4th edition: LU 3.2, Cholesky 4.2, QR 5.2, SVD figure 8.6.1 (the
  less of its two algorithms), symmetric eigenproblem 8.3, nonsymmetric 7.5, functions of matrices 9.
- LAPACK Working Note 41, appendix C: `potrf`, `getrf`, `getri`, `getrs`, `geqrf`, `orgqr`, `ormqr`, `trtrs`.
- Van Loan, Computational Frameworks for the Fast Fourier Transform: 5 N log2 N, half of it for real data.
- Graves and others, Connectionist Temporal Classification, 2006, equations 6 and 7.

Iterations have the counts that these sources expect. The squarings of `matrix_exp` depend on a norm, so they
are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = Sequence[int]


def _matrices(shape: Shape) -> tuple[int, int, int]:
    """How many matrices, and the larger and the smaller of their sides."""
    return math.prod(shape[:-2]), max(shape[-2:]), min(shape[-2:])


def _cholesky(a: Shape, *_: Any, **__: Any) -> float:
    return math.prod(a[:-2]) * a[-1] ** 3 / 3


def _lu(a: Shape, *_: Any, **__: Any) -> float:
    many, m, n = _matrices(a)
    return many * (m * n**2 - n**3 / 3)


def _solved(factored: float, a: Shape, b: Shape) -> float:
    """`factored`, and two triangular solves for each column of `b`, which may be a vector a matrix."""
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and tuple(b) == tuple(a[:-1]))
    columns = 1 if vectors else b[-1]
    many = math.prod(a[:-2])
    if not vectors:
        many = max(many, math.prod(b[:-2]))
    return factored + 2 * many * a[-1] ** 2 * columns


def _solve(a: Shape, b: Shape, *_: Any, **__: Any) -> float:
    return _solved(_lu(a), a, b)


def _by_factors(b: Shape, a: Shape, *_: Any, **__: Any) -> float:
    return _solved(0, a, b)


def _factors_first(a: Shape, pivots: Shape, b: Shape, **_: Any) -> float:
    return _solved(0, a, b)


def _triangular(a: Shape, b: Shape, *_: Any, **__: Any) -> float:
    return max(math.prod(a[:-2]), math.prod(b[:-2])) * math.prod(b[-2:]) * a[-1]


def _triangular_solve(b: Shape, a: Shape, *_: Any, **__: Any) -> float:
    return _triangular(a, b)


def _inverse(a: Shape, *_: Any, **__: Any) -> float:
    return 2 * math.prod(a[:-2]) * a[-1] ** 3


def _geqrf(a: Shape, *_: Any, **__: Any) -> float:
    many, m, n = _matrices(a)
    return many * 2 * n**2 * (m - n / 3)


def _orgqr(many: int, m: int, n: int, k: int) -> float:
    return many * (4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3)


def _qr(a: Shape, mode: str = "reduced", *_: Any, **__: Any) -> float:
    if mode == "r":
        return _geqrf(a)
    m, n = a[-2:]
    k = min(m, n)
    return _geqrf(a) + _orgqr(math.prod(a[:-2]), m, m if mode == "complete" else k, k)


def _householder(a: Shape, tau: Shape, *_: Any, **__: Any) -> float:
    return _orgqr(math.prod(a[:-2]), a[-2], a[-1], tau[-1])


def _ormqr(a: Shape, tau: Shape, other: Shape, left: bool = True, *_: Any, **__: Any) -> float:
    m, n = other[-2:] if left else (other[-1], other[-2])
    k = tau[-1]
    return math.prod(other[:-2]) * (4 * m * n * k - 2 * n * k**2)


def _svd(a: Shape, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> float:
    many, m, n = _matrices(a)
    if not compute_uv:
        return many * min(4 * m * n**2 - 4 * n**3 / 3, 2 * m * n**2 + 2 * n**3)
    if full_matrices:
        return many * min(4 * m**2 * n + 8 * m * n**2 + 9 * n**3, 4 * m**2 * n + 22 * n**3)
    return many * min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)


def _pinv(a: Shape, *_: Any, **__: Any) -> float:
    many, m, n = _matrices(a)
    return _svd(a) + 2 * many * m * n**2


def _eigh(a: Shape, uplo: str = "L", compute_v: bool = True, **_: Any) -> float:
    return math.prod(a[:-2]) * a[-1] ** 3 * (9 if compute_v else 4 / 3)


def _cubes(times: float) -> Callable[..., float]:
    """`times` n^3 for each square matrix."""
    return lambda a, *_, **__: times * math.prod(a[:-2]) * a[-1] ** 3


def _lstsq(a: Shape, b: Shape, *_: Any, **__: Any) -> float:
    many, m, n = _matrices(a)
    columns = b[-1] if len(b) >= 2 and len(b) == len(a) else 1
    # Q^T b, then a triangular solve.
    return _geqrf(a) + many * columns * (4 * m * n - 2 * n**2 + n**2)


def _fft(shape: Shape, dims: Sequence[int], each: float) -> float:
    length = math.prod([shape[dim] for dim in dims])
    return each * math.prod(shape) * math.log2(max(length, 1))


def _fft_c2c(x: Shape, dim: Sequence[int], *_: Any, **__: Any) -> float:
    return _fft(x, dim, 5)


def _fft_r2c(x: Shape, dim: Sequence[int], *_: Any, **__: Any) -> float:
    return _fft(x, dim, 2.5)


def _fft_c2r(x: Shape, dim: Sequence[int], normalization: int, last_dim_size: int, **_: Any) -> float:
    made = list(x)
    if dim:
        made[dim[-1]] = last_dim_size
    return _fft(made, dim, 2.5)


def _cdist(x: Shape, y: Shape, *_: Any, **__: Any) -> float:
    # A difference, a power and a sum for each pair and coordinate.
    many = max(math.prod(x[:-2]), math.prod(y[:-2]))
    return 3 * many * x[-2] * y[-2] * x[-1]


def _cdist_backward(grad: Shape, x: Shape, y: Shape, *_: Any, **__: Any) -> float:
    return 2 * _cdist(x, y)


def _pdist(x: Shape, *_: Any, **__: Any) -> float:
    return 3 * x[0] * (x[0] - 1) / 2 * x[1]


def _ctc(log_probs: Shape, targets: Shape, *_: Any, **__: Any) -> float:
    """Each state of each time step adds three predecessors by their logarithms, and a probability: 7."""
    time, batch = log_probs[0], (log_probs[1] if len(log_probs) == 3 else 1)
    labels = batch * targets[-1] if len(targets) == 2 else math.prod(targets)
    return 7 * time * (2 * labels + batch)


def _ctc_backward(grad: Shape, log_probs: Shape, targets: Shape, *_: Any, **__: Any) -> float:
    return 2 * _ctc(log_probs, targets) + math.prod(log_probs)


def _rnn(times: float) -> Callable[..., float]:
    """Two FLOPs for each weight and token; `times` those. Weights come as a list, or one by one."""

    def flops(x: Shape, *rest: Any, **__: Any) -> float:
        single = isinstance(rest[0], torch.Size)
        listed = rest[:2] if single else rest[0]
        return times * 2 * math.prod(x[:-1]) * sum(math.prod(w) for w in listed if len(w) == 2)

    return flops


def _grouped(a: Shape, b: Shape, *_: Any, **__: Any) -> float:
    # Rows of the one are split into groups, or columns of the other.
    return 2 * math.prod(a) * b[-1] / (a[0] if len(a) == 3 and len(b) == 2 else 1)


def _scattered(x: Shape, dim: int, index: Shape, *_: Any, **__: Any) -> float:
    """A sum, or what else reduces, for each element that is sent to a place."""
    return math.prod(index)


def _rows_added(x: Shape, dim: int, index: Shape, source: Shape, *_: Any, **__: Any) -> float:
    return math.prod(source)


FORMULAS: dict[str, Callable[..., float]] = {
    "linalg_cholesky_ex": _cholesky,
    "cholesky": _cholesky,
    "linalg_ldl_factor_ex": _cholesky,
    "cholesky_inverse": _cubes(2 / 3),
    "cholesky_solve": _by_factors,
    "_cholesky_solve_helper": _by_factors,
    "linalg_ldl_solve": _factors_first,
    "linalg_lu_factor_ex": _lu,
    "linalg_lu": _lu,
    "_linalg_det": _lu,
    "_linalg_slogdet": _lu,
    "linalg_lu_solve": _factors_first,
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": _triangular,
    "triangular_solve": _triangular_solve,
    "linalg_inv_ex": _inverse,
    "linalg_pinv": _pinv,
    "geqrf": _geqrf,
    "linalg_qr": _qr,
    "linalg_householder_product": _householder,
    "ormqr": _ormqr,
    "linalg_lstsq": _lstsq,
    "_linalg_svd": _svd,
    "_linalg_eigh": _eigh,
    "_linalg_eigvals": _cubes(10),
    "linalg_eig": _cubes(25),
    # A Taylor polynomial of degree 18 in five products.
    "linalg_matrix_exp": _cubes(10),
    "_fft_c2c": _fft_c2c,
    "_fft_r2c": _fft_r2c,
    "_fft_c2r": _fft_c2r,
    "_cdist_forward": _cdist,
    "_cdist_backward": _cdist_backward,
    "_pdist_forward": _pdist,
    "_pdist_backward": lambda grad, x, *_, **__: 2 * _pdist(x),
    "_ctc_loss": _ctc,
    "_cudnn_ctc_loss": _ctc,
    "miopen_ctc_loss": _ctc,
    "_ctc_loss_backward": _ctc_backward,
    "_cudnn_rnn": _rnn(1),
    "miopen_rnn": _rnn(1),
    "mkldnn_rnn_layer": _rnn(1),
    "_cudnn_rnn_backward": _rnn(2),
    "miopen_rnn_backward": _rnn(2),
    "mkldnn_rnn_layer_backward": _rnn(2),
    "_grouped_mm": _grouped,
    "scatter_add": _scattered,
    "scatter_reduce": _scattered,
    "index_add": _rows_added,
    "index_reduce": _rows_added,
}


# What computes a few FLOPs for each element, moves elements, draws, or makes tensors, by words of its name.
# (Tags of torch say so of pointwise ops and reductions only.)
_LIGHT = frozenset(
    """
    add addr abs mul div sub rsub floor gcd lcm eq ne lt le gt ge copysign heaviside xlogy irshift mish
    hardswish sigmoid copy clone empty zero zeros one ones full rand randn randint randperm arange linspace
    logspace eye range window fftfreq rfftfreq tensor scatter gather index masked take put pad padded pool
    upsample sampler affine norm softmax loss embedding bernoulli cauchy exponential geometric normal
    uniform poisson binomial multinomial dirichlet gamma dropout philox random noise sort topk kthvalue
    median nanmedian mode unique searchsorted bucketize histc histogram histogramdd bincount cummax cummin
    cumsum cumprod logcumsumexp cat stack split chunk roll flip rot repeat tile tril triu diag diagonal
    diags trace unfold im2col col2im shuffle unshuffle slice select narrow squeeze unsqueeze transpose
    permute expand view reshape resize as set fill dense sparse coalesce coalesced quantize quantized
    dequantize fake isin nonzero cross renorm dist thnn unpack flatten conj complex polar lift alias detach
    assert constrain amp aminmax foreach segment threshold mse huber elu gelu prelu relu hardtanh is glu t
    to nested values indices repr token memory reorder pooling unpool adam adamw sgd adagrad lerp
    efficientzerotensor and or xor not lshift rshift bitwise logical
    """.split()
)
_NUMBERED = re.compile(r"\d+d?$")


def light_by_name(name: str) -> bool:
    """Whether the aten op of this name (without its namespace) moves elements rather than computes."""
    words = [_NUMBERED.sub("", word) for word in name.strip("_").split("_")]
    return any(word in _LIGHT for word in words) or words[-1] == "backward"
