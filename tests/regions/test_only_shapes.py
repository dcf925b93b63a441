"""Values that autograd saves for their shape alone: nothing is kept or run again for them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat import remat, save_nothing, save_ops, saved_residuals
from tests.helpers import TORCH, OpCounter, Watched, crossed
from tests.regions import only_shapes
from tests.regions.inside import reachability

pytestmark = pytest.mark.skipif(TORCH != (2, 13), reason="the table was made on torch 2.13")

INDEX = torch.tensor([2, 0, 1, 0])
SAMPLES = torch.rand(2, 3, 2)
# By the node that saves the value: the shape of that, and what makes the node of it.
PROGRAMS = {
    "AdaptiveAvgPool2DBackward0": ((2, 3, 8, 8), lambda h: F.adaptive_avg_pool2d(h, 3)),
    "AdaptiveAvgPool3DBackward0": ((2, 3, 8, 8, 8), lambda h: F.adaptive_avg_pool3d(h, 3)),
    "AdaptiveMaxPool2DBackward0": ((2, 3, 8, 8), lambda h: F.adaptive_max_pool2d(h, 3)),
    "AdaptiveMaxPool3DBackward0": ((2, 3, 8, 8, 8), lambda h: F.adaptive_max_pool3d(h, 3)),
    "AvgPool2DBackward0": ((2, 3, 8, 8), lambda h: F.avg_pool2d(h, 2)),
    "AvgPool3DBackward0": ((2, 3, 8, 8, 8), lambda h: F.avg_pool3d(h, 2)),
    "CummaxBackward0": ((4, 6), lambda h: h.cummax(0)[0]),
    "CumminBackward0": ((4, 6), lambda h: h.cummin(1)[0]),
    "FftR2CBackward0": ((4, 6), lambda h: torch.view_as_real(torch.fft.rfft2(h))),
    "FractionalMaxPool2DBackward0": (
        (2, 3, 8, 8),
        lambda h: F.fractional_max_pool2d(h, 2, output_size=4, _random_samples=SAMPLES.to(h.dtype)),
    ),
    "FractionalMaxPool3DBackward0": (
        (2, 3, 8, 8, 8),
        lambda h: F.fractional_max_pool3d(
            h, 2, output_size=4, _random_samples=torch.rand(2, 3, 3, dtype=h.dtype).fill_(0.5)
        ),
    ),
    "GatherBackward0": ((4, 6), lambda h: torch.take_along_dim(h, INDEX[:, None], 1)),
    "IndexAddBackward0": ((4, 6), lambda h: h.new_ones(3, 6).index_add(0, INDEX, h)),
    "IndexCopyBackward0": ((3, 6), lambda h: h.new_ones(4, 6).index_copy(0, INDEX[:3], h)),
    "MaskedSelectBackward0": ((4, 6), lambda h: torch.masked_select(h, torch.arange(6) > 2)),
    "MaxPool2DWithIndicesBackward0": ((2, 3, 8, 8), lambda h: F.max_pool2d(h, 2)),
    "MaxPool3DWithIndicesBackward0": ((2, 3, 8, 8, 8), lambda h: F.max_pool3d(h, 2)),
    "PutBackward0": ((2, 2), lambda h: h.new_ones(3, 6).put(INDEX.reshape(2, 2) + torch.arange(2) * 5, h)),
    "ReflectionPad1DBackward0": ((2, 3, 8), lambda h: F.pad(h, (2, 1), "reflect")),
    "ReflectionPad2DBackward0": ((2, 3, 8, 8), lambda h: F.pad(h, (2, 1, 1, 1), "reflect")),
    "ReflectionPad3DBackward0": ((2, 3, 4, 8, 8), lambda h: F.pad(h, (2, 1, 1, 1, 1, 1), "reflect")),
    "ReplicationPad1DBackward0": ((2, 3, 8), lambda h: F.pad(h, (2, 1), "replicate")),
    "ReplicationPad2DBackward0": ((2, 3, 8, 8), lambda h: F.pad(h, (2, 1, 1, 1), "replicate")),
    "ReplicationPad3DBackward0": ((2, 3, 4, 8, 8), lambda h: F.pad(h, (2, 1, 1, 1, 1, 1), "replicate")),
    "TakeBackward0": ((4, 6), lambda h: h.take(INDEX * 3)),
}


aten = torch.ops.aten
OWN_INDEX = {
    "AdaptiveMaxPool2DBackward0": aten.adaptive_max_pool2d,
    "AdaptiveMaxPool3DBackward0": aten.adaptive_max_pool3d,
    "CummaxBackward0": aten.cummax,
    "CumminBackward0": aten.cummin,
    "FractionalMaxPool2DBackward0": aten.fractional_max_pool2d,
    "FractionalMaxPool3DBackward0": aten.fractional_max_pool3d,
    "MaxPool2DWithIndicesBackward0": aten.max_pool2d_with_indices,
    "MaxPool3DWithIndicesBackward0": aten.max_pool3d_with_indices,
}


def given(node, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(PROGRAMS[node][0], dtype=dtype, requires_grad=True)


def of(node):
    make = PROGRAMS[node][1]
    return lambda x: make(x.sin()) * 2


def first(fn, x, **options):
    return torch.autograd.grad(fn(x).sum(), x, **options)[0]


def second(fn, x):
    torch.manual_seed(0)
    grad = first(lambda x: fn(x).square(), x, create_graph=True)
    return torch.autograd.grad(grad, x, torch.rand_like(grad))[0]


def test_every_node_of_the_table_is_tried():
    assert PROGRAMS.keys() == reachability.NODES.keys()


@pytest.mark.parametrize(("node", "dtype"), crossed(PROGRAMS, only_shapes.DTYPES[:4], every=4))
def test_numbers_do_not_matter(node, dtype):
    x = given(node, dtype)
    try:
        found = only_shapes.check(lambda: PROGRAMS[node][1](x), [x])
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch has no kernel: {error}")
    assert [ok for (name, _), ok in found.items() if name == node] == [True]


@pytest.mark.parametrize("node", PROGRAMS)
def test_nothing_is_kept_or_run_again(node):
    x, fn = given(node), of(node)
    plain = saved_residuals(fn, x).kept_bytes
    # (An index that the op itself makes is read, so what makes it is kept here.)
    own = node in OWN_INDEX
    region = remat(fn, policy=save_ops(*OWN_INDEX.values()) if own else save_nothing)
    assert own or saved_residuals(region, x).kept_bytes <= plain - x.nbytes
    for _ in range(3):
        out = region(x)
        with OpCounter() as ops:
            (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, first(fn, x))
        assert ops["sin"] == 0
    assert torch.equal(second(region, x), second(fn, x))


@pytest.mark.parametrize("node", PROGRAMS)
def test_under_torch_func(node):
    x, fn = given(node).detach(), of(node)
    region = remat(fn)

    def loss(fn):
        return lambda x: fn(x).square().sum()

    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss(region))(x), torch.func.grad(loss(fn))(x))
    if node not in ("MaskedSelectBackward0", "FractionalMaxPool2DBackward0", "FractionalMaxPool3DBackward0"):
        both = torch.stack([x, x + 1])
        ours, torchs = [torch.vmap(torch.func.grad(loss(f)))(both) for f in (region, fn)]
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("how", ["channels_last", "integers around", "its value is read, too"])
def test_otherwise_it_is_kept(how):
    x, pool = given("AvgPool2DBackward0"), PROGRAMS["AvgPool2DBackward0"][1]

    def fn(x):
        h = x.sin()
        if how == "channels_last":
            return pool(h.contiguous(memory_format=torch.channels_last))
        return (
            pool(h) * h.exp().sum() if how == "its value is read, too" else pool(h) + h.exp()[..., ::2, ::2]
        )

    region = remat(fn)
    for _ in range(2):
        out = region(x)
        with OpCounter() as ops:
            (grad,) = torch.autograd.grad(out.sum(), x)
        assert ops["sin"] == 1
        torch.testing.assert_close(grad, first(fn, x))


def test_a_function_of_the_users_that_saves_what_a_pooling_reads():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                F.avg_pool2d(x.detach().requires_grad_(), 2)
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.saved_tensors[0] ** 2

    x = given("AvgPool2DBackward0")

    def fn(x):
        return F.avg_pool2d(Cube.apply(x.sin()), 2)

    for _ in range(2):
        torch.testing.assert_close(first(remat(fn), x), first(fn, x))


# Some ops of torch's database that have such a node; `python -m tests.regions.only_shapes` goes through all.
SAMPLED = """nn.functional.avg_pool1d nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool2d
    nn.functional.fractional_max_pool2d nn.functional.max_pool3d nn.functional.pad.reflect fft.rfft2 gather
    put index_add cummax""".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_torchs_own_samples(name):
    found = [(node, dtype, ok) for node, _, dtype, ok in only_shapes.table(name) if node in PROGRAMS]
    assert found and all(ok for *_, ok in found)


class Norms(nn.Module):
    """Two layers of one norm, and a sine in front of each."""

    def __init__(self, read=False, **options):
        super().__init__()
        self.read, self.norm = read, nn.BatchNorm1d(8, **options)

    def forward(self, x):
        mean = self.norm.running_mean
        assert mean is not None
        for _ in range(2):
            before = mean.clone() if self.read == "before" else 0
            x = self.norm(x.sin())
            after = mean * 2 if self.read == "after" else 0
            x = x.square() * (1 + before + after)
        return x


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}])
@pytest.mark.parametrize("read", [False, "before", "after"])
def test_running_statistics_are_neither_held_nor_written_again(read, options):
    """A batch norm that trains reads them to update them alone. Where others read them they are held."""
    torch.manual_seed(0)
    plain, x = Norms(read, **options), torch.randn(4, 8, requires_grad=True)
    other = copy.deepcopy(plain)
    region = remat(other)
    held = {saved.path for saved in saved_residuals(region, x)}
    assert ("norm.running_mean" in held) == bool(read)
    statistics: list[bool] = []

    def look(op, args, kwargs, out):
        if op is aten.native_batch_norm.default:
            statistics.append(args[3] is not None)

    for _ in range(3):
        right, out = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()]), region(x)
        statistics.clear()
        with Watched(look):
            found = torch.autograd.grad(out.square().sum(), [x, *other.parameters()])
        assert all(map(torch.equal, found, right))
        assert statistics == [bool(read)] * 2
        assert all(map(torch.equal, other.buffers(), plain.buffers()))
    second = torch.autograd.functional.hvp(lambda x: region(x).square().sum(), x, torch.ones_like(x))[1]
    torch.testing.assert_close(
        second, torch.autograd.functional.hvp(lambda x: plain(x).square().sum(), x, torch.ones_like(x))[1]
    )
