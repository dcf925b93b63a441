"""torch_remat's own tests, by their names: the programs with regions that are saved, and recomputed.

Of github.com/meta-pytorch/remat (0.2.2); docs/measured/trust.md has the table. Its `checkpoint` is `remat`.
Its `region(..., recompute=False)` is a region under `save_everything` inside, of which nothing runs again,
and with `recompute=True` the function itself. `recompute_needs_tensor` is not needed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat, save_everything
from tests.conformance.rows import row
from tests.helpers import LiveBytes, OpCounter

Fn = Callable[..., Any]


def region(fn: Fn, recompute: bool) -> Fn:
    return fn if recompute else remat(fn, policy=save_everything)


def saved(fn: Fn) -> Fn:
    return region(fn, recompute=False)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad * 3


class Square(torch.autograd.Function):
    """Saves its argument, or what `of` makes of it: a view, several, nothing in between."""

    @staticmethod
    def forward(ctx, x, of=lambda x: (x,)):
        ctx.save_for_backward(*of(x))
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        parts = [t for t in ctx.saved_tensors if t is not None]
        return grad * 2 * torch.cat([t.reshape(-1) for t in parts]).reshape(grad.shape), None


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y.view(2, 2).view_as(x) if x.numel() == 4 else y)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, one, other):  # type: ignore[override]
        return one * 2 + other * 3


class TransposedView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).t()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return (grad * 2).t()


def same_twice(x):
    y = x * 3
    return y, y


def rope(q, k):
    return q * 2, k * 3


def projected(x):
    w = torch.arange(12.0).reshape(2, 6) / 9
    q, k, v = (x.reshape(-1, 2) @ w).view(-1, 3, 2).unbind(1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def attention(x):
    q, k, v = saved(projected)(x)
    q, k = region(rope, True)(q, k)
    return region(lambda a, b, c: (a + b + c).sin(), True)(q, k, v)


def chained(x, first, second):
    return region(Square.apply, second)(region(Triple.apply, first)(x))


def no_grad_mask(x, mask_again, apply_again):
    with torch.no_grad():
        mask = region(lambda t: (t > 0).to(t.dtype), mask_again)(x)
    return region(torch.mul, apply_again)(x, mask)


def grad_free_stat(x, again):
    with torch.no_grad():
        region(torch.sum, again)(x)
    return saved(torch.square)(torch.sin(x))


def normalized(x, again):
    def normalize(t):
        with torch.no_grad():
            scale = t.abs().sum()
        return t * t / scale

    return region(normalize, again)(torch.sin(x))


def nested_saves(x):
    inner = saved(Square.apply)
    return saved(lambda t: inner(t * 3) + 1)(x)


def views_of(save):
    return lambda x: saved(lambda y: Square.apply(y, save))(Triple.apply(x))


def viewed_producer(x):
    a, b = saved(lambda t: t * 2)(x), saved(lambda t: t * 3)(x)
    return a.view_as(b) * 5


def three_consumers(x):
    y = saved(Triple.apply)(x)
    return y * 2 + (lambda ys: ys[0] * 2)([y]) + (lambda *, y: y * 2)(y=y)


BOTH = (True, False)
# torch_remat's test: programs over one tensor, each with the same result and gradient as without regions.
PROGRAMS: dict[str, list[Fn]] = {
    # save_region_test
    "test_save_op_restores_saved_output_view": [lambda x: saved(SavesOutput.apply)(x)],
    "test_save_preserves_none_saved_tensor_slots": [views_of(lambda y: (y, None))],
    "test_save_op_tuple_output_schema_and_grad": [lambda x: sum(saved(TwoOutputs.apply)(x))],
    "test_skipped_output_view_of_recomputed_tensor_replays_as_zero_storage": [
        lambda x: saved(lambda y: y[:1])(Triple.apply(x))
    ],
    "test_save_op_saving_bare_view_of_stub_materializes": [
        lambda x: saved(Square.apply)((lambda y: y.view_as(y))(saved(Triple.apply)(x)))
    ],
    "test_recompute_op_loads_mixed_flat_inputs": [
        lambda x: region(torch.add, True)(saved(lambda t: t * 2)(x), x * 3, alpha=2.0)
    ],
    "test_recompute_op_loads_nested_list_input": [
        lambda x: (lambda ts: torch.stack(ts).sum(0))([saved(lambda t: t * 2)(x), x * 3])
    ],
    "test_multi_op_save_region": [lambda x: saved(lambda u: torch.exp(torch.sin(u)) * u)(x).square()],
    "test_save_op_with_reshape_in_region_feeds_recompute": [attention],
    "test_save_op_saves_distinct_object_alias_of_input_is_ferried": [views_of(lambda y: (y.view_as(y),))],
    "test_save_op_saves_slice_views_of_recomputed_input_is_ferried": [views_of(lambda y: (y[:2], y[2:]))],
    "test_save_op_saved_view_of_noncontiguous_input_is_ferried": [
        lambda x: saved(lambda y: Square.apply(y, lambda y: (y[0], y[1])))(Triple.apply(x).view(2, 2).t())
    ],
    "test_nested_save_region_inside_save_runs_inert": [nested_saves],
    "test_recompute_region_inside_save_region_raises": [
        lambda x: saved(lambda t: remat(torch.exp)(t.sin()))(x)
    ],
    # bare_op_test
    "test_bare_op_after_save_op_materializes_and_variants": [
        lambda x, a=a: torch.relu(region(Triple.apply, a)(x)) for a in BOTH
    ],
    "test_bare_view_then_compute_after_save_materializes": [
        lambda x: torch.relu(saved(Triple.apply)(x).reshape(2, 2) + 1.0)
    ],
    "test_bare_list_arg_op_over_save_outputs": [lambda x: torch.cat(saved(TwoOutputs.apply)(x))],
    "test_bare_consumer_of_saved_for_backward_output_works_without_detect": [
        lambda x: saved(SavesOutput.apply)(x) + 1
    ],
    "test_save_op_returning_same_tensor_at_two_positions": [
        lambda x: saved(same_twice)(x)[0] * 2,
        lambda x: sum(saved(same_twice)(x)),
    ],
    "test_bare_binary_view_over_two_saves_rides_viewed_producer": [viewed_producer],
    "test_deferred_view_outliving_its_output_recomputes": [
        lambda x: saved(TransposedView.apply)(x.view(2, 2))[0:1] * 3.0
    ],
    # lifetime_test
    "test_save_to_save_input_lives_on_autograd": [lambda x: chained(x, False, False)],
    "test_recompute_to_save_input_is_not_retained": [lambda x: chained(x, True, False)],
    "test_recompute_consumers_share_one_producer_durable_output": [three_consumers],
    # no_grad_test
    "test_no_grad_save_region_feeding_save_region_is_not_persisted": [
        lambda x: no_grad_mask(x, False, False)
    ],
    "test_no_grad_save_region_feeding_recompute_region_is_persisted": [
        lambda x: no_grad_mask(x, False, True)
    ],
    "test_no_grad_recompute_region_replays_for_save_consumer_input": [lambda x: no_grad_mask(x, True, False)],
    "test_grad_free_code_skips_replay_only_in_save_region": [
        lambda x, a=a: grad_free_stat(x, a) for a in BOTH
    ],
    "test_no_grad_inside_region_body_is_honored_on_replay": [lambda x, a=a: normalized(x, a) for a in BOTH],
    # early_stop_test, recompute_needs_tensor_test
    "test_saved_input_from_recompute_is_rederived_without_later_saves": [lambda x: saved(torch.sin)(x * 2)],
    "test_pinned_output_read_before_the_last_save_is_kept": [lambda x: saved(lambda t: t * 2)(x).sin()],
    "test_region_consuming_bare_view_of_save_output_works": [
        lambda x: torch.mul(saved(lambda t: t * 2)(x).reshape(-1), 3.0)
    ],
    "test_bare_consumer_without_annotation_raises_during_recompute": [
        lambda x: torch.relu(saved(lambda t: t * 2)(x))
    ],
}


@row(
    "adapted",
    "gradients",
    name="""
        test_skipped_output_view_of_recomputed_tensor_replays_as_zero_storage
        test_save_op_saves_distinct_object_alias_of_input_is_ferried
        test_save_op_saves_slice_views_of_recomputed_input_is_ferried
        test_save_op_saved_view_of_noncontiguous_input_is_ferried
        test_recompute_to_save_input_is_not_retained test_save_to_save_input_lives_on_autograd
        test_recompute_consumers_share_one_producer_durable_output""",
)
@row("adapted", "right", name="test_recompute_region_inside_save_region_raises")
@row("pass", "without a strategy", name="test_bare_op_after_save_op_materializes_and_variants")
@row(
    "adapted",
    "right, without an annotation",
    name="test_bare_consumer_without_annotation_raises_during_recompute",
)
@row(
    "adapted",
    "gradients",
    name="""
        test_no_grad_save_region_feeding_save_region_is_not_persisted
        test_no_grad_save_region_feeding_recompute_region_is_persisted
        test_no_grad_recompute_region_replays_for_save_consumer_input
        test_grad_free_code_skips_replay_only_in_save_region""",
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """Bit for bit, in a first call and a second, and in two backwards of one graph."""
    for program in PROGRAMS[name]:
        for _ in range(2):
            x = torch.tensor([1.0, -2.0, 3.0, 0.5], requires_grad=True)
            out, expected = remat(program)(x), program(x)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            (want,) = torch.autograd.grad(expected.sum(), x)
            for retain in (True, False):
                (got,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
                torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- weights in several places: tied_weights_test ------------------------------------------------------


def closed_over(x, w, again):
    first, second = again
    h = region(lambda a: a @ w, first)(x)
    return region(lambda a: torch.tanh(a) @ w.t(), second)(h)


def argument(x, w, again):
    first, second = again
    h = region(torch.matmul, first)(x, w)
    return region(lambda a, b: torch.tanh(a) @ b.t(), second)(h, w)


TIED: dict[str, Fn] = {
    "test_closed_over_weight_and_transpose": closed_over,
    "test_weight_passed_to_regions_as_argument": argument,
    "test_weight_and_its_view_in_one_region": lambda x, w, again: (
        region(lambda a, b, bt: a @ b + torch.sin(a @ bt), again[0])(x, w, w.t()) @ w
    ),
    "test_weight_multiplied_with_itself": lambda x, w, again: region(torch.matmul, again[1])(
        x, region(torch.mul, again[0])(w, w)
    ),
    "test_weight_used_outside_and_inside_checkpoint": lambda x, w, again: remat(
        lambda t: region(lambda a: a @ w.t(), again[0])(t.sin())
    )(x @ w),
    "test_two_checkpoints_share_weight": lambda x, w, again: remat(
        lambda t: region(lambda a: a @ w, again[0])(t).tanh()
    )(remat(lambda t: region(lambda a: a @ w, again[1])(t).tanh())(x)),
    "test_same_weight_passed_twice_to_checkpoint": lambda x, w, again: remat(
        lambda t, a, b: region(torch.matmul, again[1])(region(torch.matmul, again[0])(t, a), b.t())
    )(x, w, w),
}


@row("pass", name="test_frozen_tied_weight")
@pytest.mark.parametrize("again", [(True, False), (False, True)])
@pytest.mark.parametrize("name", TIED)
def test_tied_weights(name, again):
    """Trained and frozen; test_frozen_tied_weight and ..._retain_graph_backward_twice are among these."""
    for trained in BOTH:
        x = (torch.arange(12.0).reshape(3, 4) / 6 - 1).requires_grad_()
        w = (torch.arange(16.0).reshape(4, 4) / 13 - 0.5).requires_grad_(trained)
        leaves = [x, w] if trained else [x]
        model = TIED[name]
        out, expected = remat(lambda x, w, model=model: model(x, w, again))(x, w), model(x, w, again)
        want = torch.autograd.grad(expected.sum(), leaves)
        for retain in (True, False):
            torch.testing.assert_close(torch.autograd.grad(out.sum(), leaves, retain_graph=retain), want)


# -- what runs again, and what is held -----------------------------------------------------------------


def measured(program: Fn, *inputs: Tensor) -> tuple[int, OpCounter]:
    """Bytes alive between the passes besides the result, and the ops of the backward."""
    with LiveBytes() as live:
        out = remat(program)(*inputs)
        held = live.bytes - out.nbytes
    with OpCounter() as ops:
        out.sum().backward()
    return held, ops


def big() -> Tensor:
    return torch.ones(1024, requires_grad=True)


@row("adapted", "no op of it runs again", name="test_save_op_runs_once")
@row("adapted", "its ops run again", name="test_recompute_op_reruns_body")
@pytest.mark.parametrize(
    ("again", "runs"),
    [(False, 0), (True, 1)],
    ids=["test_save_op_runs_once", "test_recompute_op_reruns_body"],
)
def test_a_body_runs_again_or_not(again, runs):
    """Also test_native_save_region_does_not_rerun_native_op."""
    for _ in range(2):
        held, ops = measured(lambda x: region(torch.exp, again)(x.sin()).cos(), big())
        assert ops["exp"] == runs and held == (0 if again else 4096)


@row("pass", "bytes alive")
def test_save_op_dead_output_is_freed_after_forward():
    held, _ = measured(lambda x: saved(TwoOutputs.apply)(x)[0], big())
    assert held == 0


@row("pass", "bytes alive")
def test_recompute_policy_does_not_retain_original_saved_tensors_after_forward():
    held, _ = measured(lambda x: Square.apply(x + 1).sin(), big())
    assert held == 0


@row("pass", "bytes alive")
def test_recompute_chain_does_not_retain_producer_output():
    """Also test_recompute_to_save_input_is_not_retained: what a saved region reads is recomputed for it."""
    held, ops = measured(lambda x: region(torch.sin, True)(region(torch.exp, True)(x)), big())
    assert (held, ops["exp"]) == (0, 1)


@row("pass", "bytes alive")
@row("pass", "bytes alive", name="test_recompute_consumed_input_is_kept")
@pytest.mark.parametrize("dropped", BOTH)
def test_dead_input_is_dropped(dropped):
    """An argument that no recomputation reads goes with the caller's last reference; one that is read stays.

    The second is test_recompute_consumed_input_is_kept.
    """
    base = big()

    def between():
        return remat(lambda h: saved(torch.exp)(h) if dropped else torch.exp(h.sin()))(base * 3)

    with LiveBytes() as live:
        out = between()
        assert live.bytes == out.nbytes + (0 if dropped else base.nbytes)
    out.sum().backward()


def test_trailing_bare_consumer_is_not_replayed_and_not_persisted():
    held, ops = measured(lambda x: saved(lambda t: t * 2)(x) + x, big())
    assert held == 0 and ops["add"] == ops["mul"] == 1


@row("adapted", "bytes alive", name="test_save_op_saved_tensors_live_on_autograd_not_tape")
@row("pass", "also of a graph without a backward")
def test_save_policy_checkpoint_releases_saved_tensors_by_default():
    """Also test_save_op_saved_tensors_live_on_autograd_not_tape, and those of a graph that is let go of."""
    for backward in BOTH:
        with LiveBytes() as live:
            out = remat(lambda x: saved(SavesOutput.apply)(x).sin())(big())
            assert live.bytes > out.nbytes
            if backward:
                out.sum().backward()
            del out
        assert live.bytes == 0


def test_save_output_register_hook_fires_with_grad():
    seen = []

    def body(x):
        y = saved(Triple.apply)(x)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        return y * 2

    remat(body)(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((2,), 2.0))


def test_checkpoint_under_ambient_no_grad_runs_body_once():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), LiveBytes() as live:
            out = remat(lambda x: saved(torch.exp)(x).sin())(big())
        assert not out.requires_grad and live.bytes == out.nbytes
    assert remat(lambda x: saved(torch.exp)(x).sin())(torch.ones(2)).grad_fn is None


def test_enable_grad_inside_no_grad_checkpoint():
    def body(x):
        with torch.enable_grad():
            return saved(torch.square)(x).sin()

    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        out = remat(body)(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], (x * x).cos() * 2 * x)
