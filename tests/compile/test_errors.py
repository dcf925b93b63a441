"""What cannot be compiled says which region and line; afterwards eager works as before in the same thread."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._dynamo import exc
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_policy, offload, remat, save_matmuls, scan_remat
from tests.compiled import compiled
from tests.helpers import crossed, rand, same

seen: list[torch.Tensor] = []
generator = torch.Generator()


def graph_break(x):
    torch._dynamo.graph_break()  # the line to be named
    return x.sin()


def data_dependent(x):
    if x.sum() > 0:  # the line to be named
        return x.sin()
    return x.cos()


def outside_mutation(x):
    seen.append(x)  # the line to be named
    return x.sin()


def own_generator(x):
    return x * torch.rand(3, generator=generator)  # the line to be named


def printing(x):
    print("value", x)  # the line to be named
    return x.sin()


REFUSED = (graph_break, data_dependent, outside_mutation, own_generator, printing)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    eager_still_works()


def eager_still_works():
    x = rand(3).requires_grad_()
    remat(torch.sin)(x).sum().backward()
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    same(x.grad, 2 * x.detach().cos())
    loss = lambda x: remat(torch.sin)(x).sum()  # noqa: E731
    same(jvp(grad(loss), (x.detach(),), (torch.ones(3, dtype=x.dtype),))[1], -x.detach().sin())


def line_to_be_named(function) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if "the line to be named" in line)


@pytest.mark.parametrize(("function", "transform"), crossed(REFUSED, [None, grad], every=2))
def test_what_dynamo_refuses_names_region_and_line(function, transform):
    region = remat(function, name="my block")
    loss = lambda x: region(x).sum()  # noqa: E731  # pyright: ignore
    x = rand(3)
    with pytest.raises(exc.Unsupported) as refused:
        compiled(transform(loss) if transform else loss)(x if transform else x.requires_grad_())
    message = str(refused.value)
    assert "region 'my block'" in message
    assert "write torch.where for if, return values, draw and print outside" in message
    assert f'{__file__}", line {line_to_be_named(function)}, in {function.__name__}' in message


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # the line to be named


def checkpointed(x):
    return checkpoint(torch.sin, x, use_reentrant=False).exp()  # the line to be named


@pytest.mark.parametrize("function", [branch, checkpointed], ids=lambda f: f.__name__)
def test_operators_that_torch_does_not_differentiate_name_region_and_line(function):
    x = rand(3)
    try:
        compiled(grad(lambda x: function(x).sum()))(x)
    except Exception:
        torch._dynamo.reset()
    else:
        pytest.skip("this torch differentiates it")
    region = remat(function, name="my block")
    with pytest.raises(Exception) as refused:  # noqa: PT011
        compiled(grad(lambda x: region(x).sum()))(x)  # pyright: ignore
    message = str(refused.value)
    assert "region 'my block'" in message and "write torch.where for if" in message
    assert f'{__file__}", line {line_to_be_named(function)}, in {function.__name__}' in message


def test_a_policy_that_answers_nonsense_names_itself_and_the_region():
    region = remat(lambda x: torch.sin(x).exp(), policy=checkpoint_policy(lambda info: "yes"), name="block")  # pyright: ignore
    for loss, x in (
        (lambda x: region(x).sum(), rand(3).requires_grad_()),
        (grad(lambda x: region(x).sum()), rand(3)),
    ):
        torch._dynamo.reset()
        with pytest.raises(exc.BackendCompilerFailed, match=r"answered 'yes' .* region 'block'"):
            compiled(loss)(x)


def test_a_failure_under_forward_mode_leaves_no_level():
    region = remat(lambda x: torch.sin(x).exp(), policy=checkpoint_policy(lambda info: 1 / 0), name="block")  # pyright: ignore

    def second(x, v):
        return jvp(grad(lambda x: region(x).sum()), (x,), (v,))

    with pytest.raises(exc.BackendCompilerFailed, match="division by zero"):
        compiled(second)(rand(3), rand(3))
    with torch.autograd.forward_ad.dual_level():
        pass


def test_a_failure_in_a_nested_region_leaves_no_level():
    inner = remat(lambda x: torch.sin(x).exp(), policy=checkpoint_policy(lambda info: 1 / 0))  # pyright: ignore
    outer = remat(lambda x: inner(x).exp(), policy=save_matmuls)
    with pytest.raises(exc.BackendCompilerFailed, match="division by zero"):
        compiled(torch.vmap(grad(lambda x: outer(x).sum())))(rand(2, 3))


def test_a_rule_that_dynamo_cannot_pass_on_says_what_to_write():
    class Rule:
        def __call__(self, info):
            return True

    rule = Rule()
    with pytest.raises(exc.Unsupported, match="policy = checkpoint_policy"):
        compiled(lambda x: remat(torch.sin, policy=rule)(x))(rand(3))


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_rules_of_every_kind(made):
    class Rule:
        def __init__(self, word):
            self.word = word

        def __call__(self, info):
            return self.word in str(info.op)

        def method(self, info):
            return self(info)

    word = "mm"
    x, w = rand(2, 3), rand(3, 3)
    want = grad(lambda w: torch.tanh(x @ w).sin().sum())(w)
    for rule in (Rule("mm"), Rule("mm").method, lambda info: word in str(info.op)):
        policy = checkpoint_policy(rule)
        body = lambda w: torch.tanh(x @ w).sin()  # noqa: E731
        region = remat(body, policy=policy)

        def loss(w, body=body, policy=policy, region=region):
            return (region if made == "outside" else remat(body, policy=policy))(w).sum()  # pyright: ignore

        torch._dynamo.reset()
        same(compiled(grad(loss))(w), want)


def scanned(x):
    def body(h, t):
        h = torch.tanh(h + t)
        return h, h

    return scan_remat(body, x.detach().sin(), torch.stack([x, x.cos()]))[1]


EAGER = {
    "region": remat(lambda x: torch.tanh(x @ x.sin()).exp()),
    "nested": remat(lambda x: remat(torch.tanh)(x * x).exp() * x),
    "offloaded": remat(lambda x: torch.tanh(x @ x.sin()).exp(), policy=offload(save_matmuls)),
    "scan": scanned,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
@pytest.mark.parametrize("kind", EAGER)
def test_recorded_backwards_in_compiled_code_of_what_ran_outside(kind):
    """Autograd calls hooks and Functions there, of which Dynamo would compile each frame, and fail."""

    def penalty(loss, x):
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return h.square().sum()

    def run(penalty):
        x = rand(3, 3).requires_grad_()
        penalty(EAGER[kind](x).sum(), x).backward()
        return x.grad

    traced, frames = torch.compile(penalty, backend="eager"), []
    for _ in range(3):
        torch._dynamo.utils.counters.clear()
        same(run(traced), run(penalty))
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert not any(frames[1:])


# Dynamo's own, where it resumes after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("transform", [False, True], ids=["plain", "grad"])
def test_after_a_graph_break_dynamo_looks_at_no_frame_of_this_library(transform):
    """It compiled frames of the engine, and looked at others again in each call (0.2 s for two regions)."""
    region = remat(graph_break)

    def step(x):
        if transform:
            return grad(lambda x: region(region(x)).sum())(x)
        region(region(x)).sum().backward()
        return x.grad

    want = step(rand(3).requires_grad_(not transform))
    run, frames = torch.compile(step, backend="aot_eager"), []
    for _ in range(3):
        torch._dynamo.utils.counters.clear()
        same(run(rand(3).requires_grad_(not transform)), want)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert not any(frames[1:])
