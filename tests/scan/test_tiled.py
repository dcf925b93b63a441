"""`tiled`: gradients, bytes and evaluations of a function that runs tile by tile, and what it refuses.

The transforms that it goes through are ways of the bank (`tiles_of_a_region`, `tiles_that_count`)."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from remat import RematError, remat, tiled
from remat.policies import save_matmuls
from tests.compiled import compiled
from tests.helpers import scalar
from tests.inside import trace_memory

W, V = (torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))


def leaf(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def two(x: Tensor, scale: Any = 1.0) -> dict[str, Tensor]:
    """Two results, of other numbers of dimensions, that read an argument and a captured weight."""
    return {"h": torch.tanh(x @ W) * scale, "norm": (x @ V).square().sum(-1)}


def equal(ours: Any, plain: Any, args: Any, leaves: list[Tensor], **kwargs: Any) -> None:
    found, expected = ours(*args, **kwargs), plain(*args, **kwargs)
    torch.testing.assert_close(found, expected)
    losses = [scalar(t) for t in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


@pytest.mark.parametrize("tiles", [None, 1, 2, 4, 7, 8, 100])
def test_results_and_gradients_are_those_of_the_whole(tiles):
    x, scale = leaf(2, 8, 4), leaf(4, seed=3)
    equal(tiled(two, dim=1, tiles=tiles), two, (x,), [x, scale], scale=scale)


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        ([(5, 4)], 0),
        ([(5, 4)], -2),
        ([(4, 5)], -1),
        ([(3, 2, 4)], 0),
        ([(3, 5, 2, 4)], 1),
        ([(5, 4), (5,)], 0),
        ([(2, 5, 4), (2, 5)], (-2, -1)),
        ([(2, 5, 4), (4,)], (1, None)),
        ([(4,), (2, 5, 4)], (None, 1)),
    ],
)
def test_what_is_split_and_along_which_dimension(shapes, dim):
    args = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]

    def fn(a: Tensor, b: Tensor | None = None) -> Tensor:
        if b is None:
            return torch.sin(a) * 2
        long, short = (a, b) if a.dim() > b.dim() else (b, a)
        return torch.sin(long) * (short if short.dim() == 1 and short.shape[0] == 4 else short[..., None])

    seen = []

    def counted(*args: Tensor) -> Tensor:
        seen.append([tuple(a.shape) for a in args])
        return fn(*args)

    equal(tiled(counted, dim=dim, tiles=2), fn, args, args)
    dims = dim if isinstance(dim, tuple) else (dim,) * len(args)
    looks = 2 if len(seen) < 6 else 4  # few tokens are compared twice
    for arg, d, shape in zip(args, dims, seen[looks], strict=True):
        assert d is None and shape == tuple(arg.shape) or d is not None and shape[d] == -(-arg.shape[d] // 2)


def test_arguments_are_pytrees_and_results_may_be_none():
    x, y = leaf(6, 4), leaf(6, 4, seed=1)

    def fn(pair: dict[str, Tensor], factor: float) -> Any:
        return (pair["x"] * pair["y"] * factor, None)

    found, nothing = tiled(fn, tiles=3)({"x": x, "y": y}, 2.0)
    assert nothing is None
    torch.testing.assert_close(torch.autograd.grad(found.sum(), [x, y]), (2 * y, 2 * x))


def test_a_tile_runs_once_in_the_forward_and_once_in_the_backward():
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return torch.sin(x @ W)

    x, ours = leaf(10, 4), tiled(fn, tiles=4)
    ours(x)
    assert calls == [6, 2, 3, 3, 3, 1]  # a slice of six tokens and two of these alone, once; then the tiles
    calls.clear()
    y = ours(x)
    assert calls == [3, 3, 3, 1]
    y.sum().backward()
    assert calls[4:] == [3, 3, 3]  # of the smaller last one, a region, ops run again without the function


def swiglu(width: int, inner: int) -> tuple[Any, list[Tensor]]:
    gate, up, down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
    weights: list[Tensor] = [*gate.parameters(), *up.parameters(), *down.parameters()]
    return lambda x: down(F.silu(gate(x)) * up(x)), weights


@pytest.mark.parametrize("shape", [(1024, 32), (1, 1024, 32), (4, 256, 32)])
def test_peak_is_what_lives_throughout_and_one_tile(shape):
    mlp, weights = swiglu(32, 256)
    x, ct = torch.randn(shape, requires_grad=True), torch.randn(shape)
    of = [x, *weights]

    def peak(fn: Any, x: Tensor, ct: Tensor, of: list[Tensor]) -> int:
        fn(x)
        return trace_memory(lambda mark: torch.autograd.grad(fn(x), of, ct)).peak

    untiled = peak(mlp, x, ct, of)
    for tiles in (8, 32):
        part = x.detach()[..., : shape[-2] // tiles, :].clone().requires_grad_()
        one = peak(mlp, part, ct[..., : shape[-2] // tiles, :].clone(), [part, *weights])
        fixed = 2 * x.nbytes + sum(w.nbytes for w in weights)  # result, gradients
        whole = peak(tiled(mlp, tiles=tiles), x, ct, of)
        assert whole <= 1.1 * (fixed + one) and whole < untiled / 2
        assert trace_memory(lambda mark: (tiled(mlp, tiles=tiles)(x), mark())[0]).kept == x.nbytes  # noqa: B023


@pytest.mark.parametrize("shape", [(64, 16), (4, 64, 16), (2, 3, 64, 16)])
def test_results_and_gradients_are_joined_without_a_copy(shape):
    x, ct, ours = torch.randn(shape, requires_grad=True), torch.randn(shape), tiled(torch.sin, tiles=8)
    size, one = x.nbytes, x.nbytes // 8
    y = ours(x)
    assert y.is_contiguous()
    with torch.no_grad():
        # Beside them the generator's state, by which it shows whether a tile drew numbers.
        assert trace_memory(lambda mark: ours(x)).peak == size + one + torch.get_rng_state().nbytes
    # A tile's result, its cosine, and the product of that with the cotangent.
    found = trace_memory(lambda mark: torch.autograd.grad(y, x, ct))
    assert found.result[0].is_contiguous() and found.peak == size + 3 * one


@pytest.mark.slow
def test_a_swiglu_of_8192_tokens_takes_33_mib():
    gate, up, down = (nn.Linear(*s, bias=False) for s in ((256, 1024), (256, 1024), (1024, 256)))
    mlp, x = (lambda x: down(F.silu(gate(x)) * up(x))), torch.randn(8192, 256, requires_grad=True)
    of = [x, gate.weight, up.weight, down.weight]

    def peak(fn: Any) -> float:
        return trace_memory(lambda mark: torch.autograd.grad(fn(x).square().sum(), of)).peak / 2**20

    assert round(peak(mlp)) == 193 and peak(tiled(mlp)) <= 33


@pytest.mark.parametrize("kib", [300, 400, 700])
def test_as_few_tiles_as_the_peak_allows(kib):
    mlp, weights = swiglu(16, 64)
    x, ct = torch.randn(1024, 16, requires_grad=True), torch.randn(1024, 16)
    sizes: Counter[int] = Counter()

    def fn(x: Tensor) -> Tensor:
        sizes[x.shape[0]] += 1
        return mlp(x)

    ours = tiled(fn, peak=kib << 10)
    ours(x)
    sizes.clear()
    found = trace_memory(lambda mark: torch.autograd.grad(ours(x), [x, *weights], ct)).peak
    assert 0.7 * (kib << 10) < found <= kib << 10
    assert max(sizes.values()) == 2 * (1024 // max(sizes))  # nothing is measured in a second call


def test_random_numbers_are_those_of_the_forward():
    x, drop = torch.ones(64, 8, requires_grad=True), tiled(nn.Dropout(0.5), tiles=4)
    y = drop(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y)
    assert len({tuple(row.tolist()) for row in y}) > 8


@pytest.mark.parametrize("form", ["inside", "outside"])
def test_regions_inside_and_outside_and_their_policies(form):
    x, w = leaf(6, 4), W.clone().requires_grad_()
    fn = lambda x: torch.tanh(x @ w).exp() @ w  # noqa: E731
    inside = tiled(remat(fn, policy=save_matmuls), tiles=3)
    equal(inside if form == "inside" else remat(tiled(fn, tiles=3), policy=save_matmuls), fn, (x,), [x, w])


LEVELS: dict[str, Any] = {
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x.flip(0)])),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),)),
    "hessian": lambda f, x: torch.func.hessian(lambda s: f(x * s))(x[0]),
}


@pytest.mark.parametrize("way", LEVELS)
def test_regions_around_tiles_of_regions(way):
    trained = V.clone().requires_grad_()
    body = lambda x, w: torch.tanh(x @ trained).sin() @ w  # noqa: E731
    plain = lambda x: body(x.exp(), W.cos()).sin().sum()  # noqa: E731
    inner = remat(body, policy=save_matmuls)
    ours = remat(lambda x: tiled(inner, tiles=3)(x.exp(), w=W.cos()).sin().sum())
    for _ in range(2):
        x = leaf(6, 4).detach()
        torch.testing.assert_close(LEVELS[way](ours, x), LEVELS[way](plain, x))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "tiles", "loops"), [(6, 2, 1), (6, 6, 1), (7, 4, 1)])
def test_compiled_there_is_one_loop_whatever_the_number_of_tiles(tokens, tiles, loops):
    x, w = leaf(2, tokens, 4), W.clone().requires_grad_()
    ours = tiled(lambda x: torch.tanh(x @ w).sin(), tiles=tiles)
    plain = torch.tanh(x @ w).sin().square().sum()
    counts: Counter[str] = Counter()

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.update(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    value = compiled(lambda x: ours(x).square().sum(), backend)(x)
    torch.testing.assert_close(torch.autograd.grad(value, [x, w]), torch.autograd.grad(plain, [x, w]))
    # Where tiles do not divide, the smaller last one is a region.
    assert counts["remat.scan_forward.default"] == counts["remat.scan_pull.default"] == loops


MIXING: dict[str, tuple[Any, str]] = {
    "softmax": (lambda x: x.softmax(-2), "aten._softmax"),
    "mean": (lambda x: x - x.mean(-2, keepdim=True), "aten.mean"),
    "of all": (lambda x: x * x.mean(), "aten.mean"),
    "from the left": (lambda x: x.cumsum(-2), "aten.cumsum"),
    "from the right": (lambda x: x.flip(-2).cumsum(-2).flip(-2), "aten.flip"),
    "attention": (lambda x: (x @ x.mT).softmax(-1) @ x, "aten._softmax"),
    "convolution": (lambda x: F.conv1d(x.mT, torch.ones(4, 4, 3).double(), padding=1).mT, "aten.convolution"),
    "reversed": (lambda x: x.flip(-2), "aten.flip"),
    "neighbours": (lambda x: x.roll(1, -2), "aten.roll"),
    "positions": (lambda x: x + torch.arange(x.shape[-2])[:, None], "aten.add"),
    "batch norm": (lambda x: F.batch_norm(x[0], None, None, training=True)[None], "aten.native_batch_norm"),
    "a sum": (lambda x: x.sum(-2), "aten.sum"),
    "after dropout": (lambda x: F.dropout(x, 0.5) * x.mean(), "aten.mean"),
    "integers": (lambda x: x.argsort(-2), "aten.sort"),
    "bools": (lambda x: x > x.mean(-2, keepdim=True), "aten.mean"),
}


@pytest.mark.parametrize("case", MIXING)
def test_what_mixes_tokens_is_refused_with_the_op(case):
    fn, op = MIXING[case]
    x, before = leaf(2, 9, 4), torch.get_rng_state()
    with pytest.raises(RematError, match=rf"tiled\(<lambda>\): {op}\S*, at .*test_tiled.py:.* mixes tokens"):
        tiled(fn, tiles=3)(x if case != "batch norm" else x[:1])
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch_of_as_many_as_a_tile_has_tokens_is_not_taken_for_them():
    with pytest.raises(RematError, match=r"is shape \(3, 6\), with no row for each token along dim=-2"):
        tiled(lambda x: x.square().sum(-1), tiles=3)(leaf(3, 9, 4))


def test_what_is_no_number_or_infinite_mixes_nothing():
    x = leaf(9, 4).detach()
    x[3] = torch.nan
    for fn in (lambda x: x.sin(), lambda x: x.masked_fill(x > 0, -torch.inf)):
        torch.testing.assert_close(tiled(fn, tiles=3)(x), fn(x), equal_nan=True)
    x[0] = torch.nan
    with pytest.raises(RematError, match="aten.cumsum"):
        tiled(lambda x: x.cumsum(-2), tiles=3)(x)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("case", ["softmax", "from the left", "from the right", "mean", "reversed"])
def test_few_tokens_are_compared(case, count):
    with pytest.raises(RematError, match="mixes tokens"):
        tiled(MIXING[case][0], tiles=2)(leaf(count, 4))


@pytest.mark.parametrize("case", ["softmax", "from the left", "from the right", "mean"])
@pytest.mark.parametrize("start", [0, 6, 12])
def test_tokens_that_tell_nothing_are_not_the_ones_compared(case, start):
    fn = tiled(MIXING[case][0], tiles=3)
    zeros, x = torch.zeros(18, 4, dtype=torch.float64), leaf(18, 4).detach()
    if case != "softmax":
        assert not fn(zeros[:1]).any()
    with contextlib.suppress(RematError):
        fn(zeros)
    zeros[start : start + 6] = x[start : start + 6]
    with pytest.raises(RematError, match="mixes tokens"):
        fn(zeros)


class Modal(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, causal: bool = False) -> Tensor:
        x = x if y is None else (x @ y.mT).softmax(-1) @ y
        return x.cumsum(-2) if causal or self.training else x


def test_another_mode_flag_or_division_is_compared_anew():
    module, x = Modal().eval(), leaf(9, 4)
    tiled(module, tiles=3)(x)
    tiled(module, dim=(-2, None), tiles=3)(x, x)
    with pytest.raises(RematError, match="aten.cumsum"):
        tiled(module, tiles=3)(x, causal=True)
    with pytest.raises(RematError, match="_softmax"):
        tiled(module, tiles=3)(x, x)
    with pytest.raises(RematError, match="aten.cumsum"):
        tiled(module.train(), tiles=3)(x)


def test_what_mixes_tokens_is_refused_under_transforms():
    fn = tiled(lambda x: x.softmax(-2), tiles=2)
    for run in (torch.func.grad(lambda x: fn(x)[0, 0, 0]), torch.func.vmap(fn), torch.func.jacfwd(fn)):
        with pytest.raises(RematError, match="_softmax"):
            run(leaf(3, 6, 4).detach())


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda x: tiled(cast(Any, 3)), TypeError, "the function comes first, got 3"),
        (lambda x: tiled(torch.sin, tiles=0), ValueError, "an int of at least 1"),
        (lambda x: tiled(torch.sin, tiles=cast(Any, 2.0)), ValueError, "an int of at least 1"),
        (lambda x: tiled(torch.sin, tiles=2, peak="1MiB"), ValueError, "follows from a peak"),
        (lambda x: tiled(torch.sin, peak="much")(x), ValueError, "write bytes as an int"),
        (lambda x: tiled(torch.sin, peak=8)(x), ValueError, "At least [0-9,]+ bytes"),
        (lambda x: tiled(torch.sin, dim=2)(x), ValueError, r"dim=2 is no dimension .*\(6, 4\)"),
        (lambda x: tiled(torch.add)(x, x[:3]), ValueError, r"\(6, 4\), \(3, 4\) have \[6, 3\] tokens"),
        (lambda x: tiled(torch.add)(x, x[0]), ValueError, "Hand over by keyword"),
        (lambda x: tiled(torch.add, dim=(0,))(x, x), ValueError, "for 1 positional arguments, got 2"),
        (lambda x: tiled(torch.sin)(cast(Any, 3.0)), TypeError, "no positional argument has a tensor"),
        (lambda x: tiled(lambda x: 3, tiles=2)(x), ValueError, "is int, with no row for each token"),
        (lambda x: tiled(lambda x: x[:2], tiles=1)(x), ValueError, r"\(2, 4\), with no row for each token"),
    ],
)
def test_bad_input(make, kind, says):
    with pytest.raises(RematError, match=says) as raised:
        make(leaf(6, 4))
    assert isinstance(raised.value, kind)


@pytest.mark.parametrize("options", [{"tiles": 2}, {"peak": "2KiB"}])
def test_what_a_call_has_told_of_a_module_holds_for_the_next_tiled_function(options):
    seen: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.numel() // 4)
            return super().forward(x)

    def looks(dim: int, x: Tensor) -> int:
        """Calls beside those of the tiles, which the last call is one of."""
        seen.clear()
        tiled(module, dim=dim, **options)(x)
        return len(seen) - x.numel() // 4 // seen[-1]

    module, x = Counted(4, 4), torch.randn(8, 4)
    assert looks(-2, x) >= 2 and looks(-2, x) == 0
    # Tokens along another dimension are compared, too.
    assert looks(-3, torch.randn(2, 8, 4)) > 0


class Writes(nn.Module):
    """Its buffers are those of tile after tile: a count in place, a moving average, one that is put anew."""

    count: Tensor
    mean: Tensor
    anew: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=torch.float64)
        for name in ("count", "mean", "anew"):
            self.register_buffer(name, torch.zeros(4, dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        self.count += y.detach().gt(0).flatten(0, -2).sum(0)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.flatten(0, -2).mean(0), alpha=0.1)
        self.anew = 0.5 * self.anew + y.detach().flatten(0, -2).amax(0)
        self.calls += 1
        return y


def trained(module: nn.Module, fn: Any, x: Tensor) -> Any:
    of = [x, *module.parameters()]
    loss = fn(x).sin().sum()
    return [torch.autograd.grad(loss, of, retain_graph=keep) for keep in (True, False)]


def twice_differentiated(module: nn.Module, fn: Any, x: Tensor) -> Any:
    of = [x, *module.parameters()]
    first = torch.autograd.grad(fn(x).sin().sum(), of, create_graph=True)
    return first, torch.autograd.grad(scalar(first), of)


def functional(module: nn.Module, fn: Any, x: Tensor) -> Any:
    around = nn.Module()
    around.inner, around.forward = module, fn
    given = dict(around.named_parameters()), {name: b.clone() for name, b in around.named_buffers()}
    call = lambda p, x, b: torch.func.functional_call(around, (p, b), (x,)).sin().sum()  # noqa: E731
    return torch.func.grad(call)(given[0], x.detach(), given[1]), given[1]


@pytest.mark.parametrize("tiles", [4, 3, 1])
@pytest.mark.parametrize("run", [trained, twice_differentiated, functional])
def test_what_a_tile_writes_to_is_as_after_a_loop_over_the_tiles(run, tiles):
    found, expected = [], []
    for seen in (found, expected):
        torch.manual_seed(0)
        module, size = Writes(), -(-8 // tiles)
        loop = lambda x: torch.cat([module(part) for part in x.split(size, -2)], -2)  # noqa: B023, E731
        for call in range(3):
            fn = tiled(module, tiles=tiles) if seen is found else loop
            seen += [run(module, fn, leaf(2, 8, 4, seed=call)), [b.clone() for b in module.buffers()]]
            if run is trained:
                seen.append(module.calls)
    torch.testing.assert_close(found, expected)


def test_what_reads_writes_of_tiles_before_mixes_tokens():
    seen = torch.zeros((), dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return x * seen.add_(x.shape[0]).clone()

    for _ in range(2):
        with pytest.raises(RematError, match="aten.add_.Tensor.* mixes tokens"):
            tiled(fn, tiles=2)(leaf(6, 4))
        assert not seen


@pytest.mark.parametrize("options", [{"tiles": 2}, {"peak": "2KiB"}])
@pytest.mark.parametrize("way", ["module", "closure"])
def test_what_a_first_call_looks_at_is_not_written_to(options, way):
    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.shape[-2]
            return super().forward(x)

    module, x = Counted(), torch.randn(8, 4)
    fn = tiled(module if way == "module" else lambda x: module(x), **options)
    with torch.no_grad():
        for call in (1, 2):
            fn(x)
            assert module.seen == 8 * call


def test_a_write_into_what_is_split_is_named_as_that():
    with pytest.raises(RematError, match="the body wrote into xs in place"):
        tiled(lambda x: x.mul_(2) + 1, tiles=3)(leaf(6, 4).detach())


def test_no_tokens_and_no_gradients():
    assert tiled(torch.sin, tiles=2)(torch.zeros(0, 4)).shape == (0, 4)
    with torch.no_grad():
        x = leaf(6, 4)
        torch.testing.assert_close(tiled(torch.sin, tiles=4)(x), x.sin())
