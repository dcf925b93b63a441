"""`linear_cross_entropy` beside the loss of whole logits: derivatives, bytes, products, bad input."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import RematError, remat, save_everything, scan_remat
from remat.losses import linear_cross_entropy
from tests.compiled import compiled
from tests.helpers import OpCounter, crossed
from tests.inside import trace_memory

CLASSES, WIDTH, IGNORED = 11, 4, 7


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The same loss of logits that lie in memory whole, of torch's functions."""
    z, cap = options.pop("z_loss", 0.0), options.pop("softcap", None)
    bias, reduction = options.pop("bias", None), options.pop("reduction", "mean")
    options.pop("tiles", None)
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = cap * torch.tanh(logits / cap) if cap is not None else logits
    loss = F.cross_entropy(logits, targets.flatten(), reduction="none", **options)
    there = targets.flatten() != options.get("ignore_index", -100)
    loss = loss + z * logits.logsumexp(-1).square() * there
    if reduction == "none":
        return loss.view(targets.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / there.sum()


def operands(*, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = [(2, 5, WIDTH), (CLASSES, WIDTH), (CLASSES,)][: 2 + bias]
    leaves = [torch.randn(s, dtype=torch.float64, generator=made).requires_grad_() for s in shapes]
    targets = torch.randint(CLASSES, (2, 5), generator=made)
    targets[0, 1] = targets[1, 4] = IGNORED
    return leaves, targets


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "ignore_index": IGNORED},
    "three tiles": {"tiles": 3, "ignore_index": IGNORED},
    "a row a tile": {"tiles": 100},
}
REDUCTIONS = ("mean", "sum", "none")


def of(leaves: list[Tensor], targets: Tensor, fn: Any, **options: Any) -> Any:
    def loss(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        made = fn(hidden, weight, targets, bias=bias[0] if bias else None, **options)
        return made.square().sum()

    return loss


def plain(loss: Any, leaves: list[Tensor]) -> Any:
    return torch.autograd.grad(loss(*leaves), leaves)


def twice(loss: Any, leaves: list[Tensor]) -> Any:
    value = loss(*leaves)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    return first, torch.autograd.grad(value, leaves)


def second(loss: Any, leaves: list[Tensor]) -> Any:
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return first, torch.autograd.grad(total, leaves)


def batched(loss: Any, leaves: list[Tensor]) -> Any:
    cts = torch.tensor([1.0, -2.0], dtype=torch.float64)
    return torch.autograd.grad(loss(*leaves), leaves, cts, is_grads_batched=True)


def bare(fn: Any) -> Any:
    return lambda loss, leaves: fn(loss, [t.detach() for t in leaves])


WAYS: dict[str, Any] = {
    "plain": plain,
    "twice": twice,
    "second": second,
    "batched": batched,
    "grad": bare(lambda f, x: grad(f, (0, 1))(*x)),
    "jvp": bare(lambda f, x: jvp(f, tuple(x), tuple(t.cos() for t in x))),
    "per sample": bare(
        lambda f, x: vmap(grad(f, 1), (0, None, None))(torch.stack([x[0], x[0].sin()]), *x[1:])
    ),
    "per sample weights": bare(
        lambda f, x: vmap(grad(f), (None, 0, None))(x[0], torch.stack([x[1], x[1].sin()]), x[2])
    ),
    "jacrev": bare(lambda f, x: jacrev(grad(f, 2), 1)(*x)),
    "jacfwd": bare(lambda f, x: jacfwd(grad(f), 1)(*x)),
    "hessian": bare(lambda f, x: hessian(f, 2)(*x)),
    "in a region": lambda f, x: plain(remat(f), x),
    "in a region that keeps all": lambda f, x: plain(remat(f, policy=save_everything), x),
    "grad of a region": bare(lambda f, x: grad(remat(f), 1)(*x)),
    "grad of grad of a region": bare(lambda f, x: grad(lambda w: grad(remat(f))(x[0], w, x[2]).sum())(x[1])),
    "in a scan": lambda f, x: plain(
        lambda *x: scan_remat(lambda c, _: (c + f(*x), None), x[0].sum() * 0, length=2)[0], x
    ),
}


@pytest.mark.parametrize(("way", "options", "reduction"), crossed(WAYS, OPTIONS, REDUCTIONS, every=5))
def test_numbers_and_derivatives_are_those_of_whole_logits(way, options, reduction):
    leaves, targets = operands()
    ours, theirs = (
        WAYS[way](of(leaves, targets, fn, reduction=reduction, **OPTIONS[options]), leaves)
        for fn in (linear_cross_entropy, whole)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "options"), crossed(REDUCTIONS, OPTIONS, every=4))
def test_compiled(reduction, options):
    leaves, targets = operands()
    fn = compiled(of(leaves, targets, linear_cross_entropy, reduction=reduction, **OPTIONS[options]))
    expected = plain(of(leaves, targets, whole, reduction=reduction, **OPTIONS[options]), leaves)
    torch.testing.assert_close(plain(fn, leaves), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("under_autocast", [False, True])
def test_low_precision(dtype, under_autocast):
    leaves, targets = operands(bias=False)
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, tiles=2)
    found = torch.autograd.grad(loss, leaves)
    assert loss.dtype == torch.float32 and [g.dtype for g in found] == [dtype] * 2
    expected = whole(leaves[0].float(), leaves[1].float(), targets)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=5e-2, atol=2e-2)


def test_shapes_of_one_token_of_none_and_of_all_ignored():
    leaves, _ = operands(bias=False)
    hidden, weight = leaves
    one = linear_cross_entropy(hidden[0, 0], weight, torch.tensor(3))
    torch.testing.assert_close(one, F.cross_entropy(weight @ hidden[0, 0], torch.tensor(3)))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert linear_cross_entropy(hidden[0, :0], weight, nothing, reduction="none").shape == (0,)
    assert linear_cross_entropy(hidden[0, :0], weight, nothing, reduction="sum") == 0
    ignored = torch.full((5,), -100)
    loss = linear_cross_entropy(hidden[0], weight, ignored)
    assert loss.isnan() and not any(g.any() for g in torch.autograd.grad(loss, leaves))  # as in torch
    made = jvp(lambda w: linear_cross_entropy(hidden[0], w, ignored), (weight,), (weight,))
    assert made[0].isnan() and made[1].isnan()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("way", ["second", "batched"])
def test_operands_that_are_made_of_one_another(way, reduction):
    (_, weight), _ = operands(bias=False)
    ids = torch.tensor([0, 1, 1, 2, 3])

    def loss(fn: Any) -> Any:
        tied = lambda w: fn(w[ids].sin(), w, ids + 4, bias=w[:, 0].cos(), reduction=reduction).sum()  # noqa: E731
        return WAYS[way](tied, [weight])

    torch.testing.assert_close(loss(linear_cross_entropy), loss(whole))


def test_a_byte_holds_the_class_that_minus_100_would_be():
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64).requires_grad_() for n in (3, 200))
    targets = torch.tensor([156, 3, 156])
    ours, theirs = linear_cross_entropy(hidden, weight, targets.byte()), whole(hidden, weight, targets)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(t, [hidden, weight]) for t in (ours, theirs)))


def test_the_loss_of_an_ignored_token_is_zero_where_its_logits_are_no_numbers():
    (hidden, weight), targets = operands(bias=False)
    hidden = hidden.detach().index_fill(1, torch.tensor(1), torch.nan).requires_grad_()
    targets[:, 1] = -100
    for reduction in ("mean", "sum"):
        ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        theirs = F.cross_entropy((hidden @ weight.mT).flatten(0, 1), targets.flatten(), reduction=reduction)
        torch.testing.assert_close(ours, theirs)


def test_float64_stays_under_autocast():
    leaves, targets = operands()
    with torch.autocast("cpu", torch.bfloat16):
        ours = of(leaves, targets, linear_cross_entropy)(*leaves)
    theirs = of(leaves, targets, whole)(*leaves)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_a_scaled_loss_in_float16_has_gradients_beyond_its_least_number():
    made = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(4096, 8, generator=made).requires_grad_() for _ in range(2))
    targets, scale = torch.randint(10, (4096,), generator=made), 2.0**16
    with torch.autocast("cpu", torch.float16):
        ours = linear_cross_entropy(hidden * 0.1, weight, targets)
    theirs = whole(hidden * 0.1, weight, targets)
    found, expected = (torch.autograd.grad(t * scale, weight)[0][10:] / scale for t in (ours, theirs))
    # In classes that are no target it is a probability alone, of about 1 / 4096 for each of 4096 tokens.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


def test_losses_beyond_the_range_of_an_exponential():
    hidden, weight = (
        torch.tensor([[1000.0], [-1000.0]]),
        torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True),
    )
    targets = torch.tensor([1, 0])
    for reduction in ("none", "mean"):
        fns: Any = linear_cross_entropy, whole
        ours, theirs = (fn(hidden, weight, targets, reduction=reduction) for fn in fns)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(v.sum(), weight) for v in (ours, theirs)))


def test_three_products_a_tile_and_none_in_the_backward():
    leaves, targets = operands(bias=False)
    with OpCounter() as forward:
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, tiles=5)
    with OpCounter() as backward:
        torch.autograd.grad(loss, leaves)
    assert (forward["mm"], forward["addmm_"], backward.dots) == (2 * 5, 5, 0)
    # Of a loss for each token two more in the backward, and the logits once more.
    with OpCounter() as forward:
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, tiles=5, reduction="none")
    with OpCounter() as backward:
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    assert (forward.dots, backward["mm"], backward["addmm_"]) == (5, 2 * 5, 5)
    # In a region gradients would be made in the forward, and once more: a tile runs again in their place.
    with OpCounter() as forward:
        remat(of(leaves, targets, linear_cross_entropy, tiles=5))(*leaves)
    assert forward.dots + forward["addmm_"] == 5


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bytes_are_those_of_gradients_and_a_tile(reduction):
    count, width, classes, tiles = 512, 64, 4096, 16
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    targets = torch.randint(classes, (count,))
    ct = torch.ones(count) if reduction == "none" else torch.ones(())

    def step(fn: Any, **options: Any) -> int:
        loss = lambda: fn(hidden, weight, targets, reduction=reduction, **options)  # noqa: E731
        return trace_memory(lambda mark: torch.autograd.grad(loss(), [hidden, weight], ct)).peak

    gradients, tile = weight.nbytes + hidden.nbytes, count // tiles * classes * 4
    found = step(linear_cross_entropy, tiles=tiles)
    assert gradients + tile <= found <= 1.02 * (gradients + tile)
    assert step(whole) > 2 * count * classes * 4 > 10 * tile
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13
        # (By default chunks of 2.14 are smaller than ours, those of 2.13 larger.)
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=count // tiles, chunking_method=None)
        theirs = lambda *args, **options: F.linear_cross_entropy(*args, options=chunks, **options)  # noqa: E731
        assert found <= step(theirs)


def test_under_transforms_a_tile_runs_again_and_only_one_lives():
    count, width, classes = 512, 16, 4096
    hidden, weight = torch.randn(count, width), torch.randn(classes, width)
    targets = torch.randint(classes, (count,))
    loss = lambda h, w: linear_cross_entropy(h, w, targets, tiles=16)  # noqa: E731
    found = trace_memory(lambda mark: grad(loss, (0, 1))(hidden, weight)).peak
    # Two gradients of the weight, that of a tile and their sum; of a tile's logits a handful.
    assert found < 3 * weight.nbytes + 2 * hidden.nbytes + 6 * 32 * classes * 4 < count * classes * 4


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"hidden": 3.0}, TypeError, "hidden is float"),
        ({"hidden": torch.ones(2, 5, 4, dtype=torch.complex64)}, TypeError, "must be floats"),
        ({"weight": torch.ones(11, 4).long()}, TypeError, "must be floats"),
        ({"targets": torch.ones(2, 5)}, TypeError, "write the index of a class"),
        ({"targets": torch.ones(5, dtype=torch.int64)}, ValueError, r"targets \(5,\): a target is needed"),
        ({"weight": torch.ones(11, 3).double()}, ValueError, r"weight \(11, 3\).*hidden is \[..., width\]"),
        ({"weight": torch.ones(4).double()}, ValueError, "weight .classes, width"),
        ({"bias": torch.ones(3).double()}, ValueError, r"bias \(3,\) is not \[11\]"),
        ({"reduction": "avg"}, ValueError, "reduction='avg'"),
        ({"label_smoothing": 1.5}, ValueError, "from 0 to 1"),
        ({"z_loss": -1.0}, ValueError, "at least 0"),
        ({"softcap": 0.0}, ValueError, "above 0 or None"),
        ({"tiles": 0}, ValueError, "an int of at least 1"),
        ({"tiles": 1.5}, ValueError, "an int of at least 1"),
    ],
)
def test_bad_input(options, kind, says):
    (hidden, weight), targets = operands(bias=False)
    given = {"hidden": hidden, "weight": weight, "targets": targets} | options
    with pytest.raises(RematError, match=says) as raised:
        linear_cross_entropy(**cast(Any, given))
    assert isinstance(raised.value, kind)
    first, again = [linear_cross_entropy(hidden, weight, targets) for _ in range(2)]
    torch.testing.assert_close(first, again)


def test_a_second_backward_says_that_the_graph_is_gone():
    leaves, targets = operands()
    loss = linear_cross_entropy(leaves[0], leaves[1], targets)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
