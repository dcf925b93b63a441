"""Bad input: each a clear error, nothing leaked, nothing silently wrong."""

import functools

import pytest
import torch
from torch.func import grad, vmap

from remat import RematError, remat
from remat.policies import save_matmuls, save_nothing, save_ops
from tests.helpers import FEW, POLICIES, crossed, rand, same, unseen, vjp


@pytest.fixture(autouse=True)
def ordinary_calls_work_afterwards():
    yield
    x, w = rand(3, 3), rand(3, 3, seed=1)
    region = remat(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w), policy=save_matmuls)
    expected = grad(lambda x: torch.tanh(torch.tanh(x @ w) @ w).sum())(x)
    same(grad(lambda x: region(x, w).sum())(x), expected)
    leaf = x.clone().requires_grad_()
    same(torch.autograd.grad(region(leaf, w).sum(), leaf)[0], expected)


# -- what remat is called with ------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [3, "block", [torch.sin], torch.ones(2)])
def test_function_that_cannot_be_called(fn):
    with pytest.raises(TypeError, match="callable"):
        remat(fn)


@pytest.mark.parametrize("policy", ["save_matmuls", 3, torch.mm])
def test_policy_of_a_wrong_type(policy):
    with pytest.raises(RematError, match="policy"):
        remat(torch.sin, policy=policy)


@pytest.mark.parametrize("mode", ["backward", "grad", "vmap_grad", "nested"])
@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_policy_with_a_wrong_answer(mode, answer):
    def bad_rule(info):
        return answer

    region = remat(lambda x: torch.tanh(x.sin()), policy=bad_rule, name="my_block")
    with pytest.raises(RematError) as caught:
        run(mode, region)
    assert (
        "bad_rule" in str(caught.value)
        and repr(answer) in str(caught.value)
        and "aten.sin" in str(caught.value)
    )
    assert "my_block" in str(caught.value)


def run(mode, region, x=None):
    x = rand(3) if x is None else x
    if mode in ("backward", "unseen"):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(region(leaf).sum(), leaf)[0]
    way = grad(lambda x: region(x).sum())
    if "nested" in mode:
        way = grad(lambda x, way=way: way(x).sum())
    return vmap(way)(torch.stack([x, x])) if "vmap" in mode else way(x)


MODES = pytest.mark.parametrize("mode", ["backward", "grad", "vmap_grad", "nested"])
# Where the function itself runs again: under nested levels, and in plain autograd where a kernel went unseen.
RUN_AGAIN = pytest.mark.parametrize("mode", ["unseen", "nested", "vmap_nested"])


WRONG = {
    "determinism_check": (lambda: remat(torch.sin, determinism_check="sometimes"), "'sometimes'"),  # type: ignore
    "too large": (
        lambda: remat(lambda x, flag: x.sin(), static_argnums=(3,))(rand(3), True),
        "static_argnums",
    ),
    "too small": (
        lambda: remat(lambda x, flag: x.sin(), static_argnums=(-4,))(rand(3), True),
        "static_argnums",
    ),
    "no such name": (
        lambda: remat(lambda x, flag: x.sin(), static_argnames=("flog",))(rand(3), flag=True),
        "static_argnames",
    ),
    "a text": (lambda: remat(torch.sin, static_argnums="x"), "static_argnums"),  # type: ignore
    "a lazy module": (lambda: remat(torch.nn.LazyLinear(4))(rand(2, 3)), "Run the module once before"),
    "an argument turned": (lambda: remat(lambda x, m: x * m.t_())(rand(4, 4), rand(4, 4)), "argument"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_refused_at_once(kind):
    call, told = WRONG[kind]
    with pytest.raises((RematError, ValueError, TypeError), match=told):
        call()


class Opaque:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("mode", ["grad", "vmap_grad", "nested"])
def test_outputs_that_torch_func_does_not_accept(mode):
    """It takes them as they are; nested, what a generator computes once the region is over would be lost."""
    region = remat(lambda x: Opaque(x.sin()), name="my_block")
    run(mode, lambda x: region(x).value)
    lazy = remat(lambda x: (row.sin() for row in x), name="my_block")
    if mode != "nested":
        same(run(mode, lambda x: next(lazy(x))), run(mode, lambda x: x[0].sin()))
        return
    with pytest.raises(RematError, match="'my_block' returns a generator"):
        run(mode, lambda x: next(lazy(x)))


@MODES
def test_wrong_call_is_the_functions_own_error(mode):
    with pytest.raises(TypeError, match="positional"):
        run(mode, lambda x: remat(lambda x: x)(x, x))  # type: ignore[call-arg]


# -- exceptions inside --------------------------------------------------------------------------------


class Mine(Exception):
    pass


@MODES
@pytest.mark.parametrize("policy", ["nothing", "matmuls", "rule"])
def test_exception_in_the_forward(mode, policy):
    def fn(x):
        torch.dropout(x.sin(), 0.5, True)
        raise Mine("forward")

    before = torch.get_rng_state()
    with pytest.raises(Mine, match="forward"):
        run(mode, remat(fn, policy=POLICIES[policy])) if mode != "vmap_grad" else run("grad", remat(fn))
    assert not torch.equal(before, torch.get_rng_state())


@RUN_AGAIN
@pytest.mark.parametrize("policy", ["nothing", "matmuls", "rule"])
def test_exception_in_the_recomputation(mode, policy):
    runs = []

    def fn(x):
        runs.append(1)
        h = (x + unseen(x) if mode == "unseen" else x).sin()
        if len(runs) > 1:
            raise Mine("again")
        return torch.tanh(h.exp()).cos()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(Mine, match="again"):
        run(mode, remat(fn, policy=POLICIES[policy]))
    assert torch.equal(before, torch.get_rng_state())


@MODES
def test_exception_in_a_nested_region(mode):
    def inner(x):
        raise Mine("deep")

    with pytest.raises(Mine, match="deep"):
        run(mode, remat(lambda x: remat(inner)(x.sin()).exp()))


def test_backward_can_be_tried_again_after_a_failure():
    broken = []

    def fn(x):
        h = (x + unseen(x)).sin().exp()
        if broken:
            raise Mine()
        return h.tanh()

    x = rand(3).requires_grad_()
    out = remat(fn)(x).sum()
    broken.append(1)
    with pytest.raises(Mine):
        torch.autograd.grad(out, x, retain_graph=True)
    broken.clear()
    same(torch.autograd.grad(out, x)[0], grad(lambda x: x.sin().exp().tanh().sum())(x.detach()))


# -- mutation between forward and backward ------------------------------------------------------------


def positional(w):
    return lambda wrap, x: wrap(lambda x, w: torch.tanh(x * w).exp())(x, w)


def keyword(w):
    return lambda wrap, x: wrap(lambda x, *, w: torch.tanh(x * w).exp())(x, w=w)


def in_a_container(w):
    return lambda wrap, x: wrap(lambda x, p: torch.tanh(x * p["w"][0]).exp())(x, {"w": [w]})


def in_a_closure(w):
    return lambda wrap, x: wrap(lambda x: torch.tanh(x * w).exp())(x)


def in_a_captured_container(w):
    held = {"w": [w]}
    return lambda wrap, x: wrap(lambda x: torch.tanh(x * held["w"][0]).exp())(x)


def in_a_partial(w):
    return lambda wrap, x: wrap(functools.partial(lambda w, x: torch.tanh(x * w).exp(), w))(x)


HOW = [positional, keyword, in_a_container, in_a_closure, in_a_captured_container, in_a_partial]


@pytest.mark.parametrize(("how", "policy", "mode"), crossed(HOW, FEW, ["backward", "vjp"]))
def test_tensor_mutated_between_forward_and_backward(how, policy, mode):
    w = rand(3)
    region = how(w)
    wrap = functools.partial(remat, policy=POLICIES[policy], name="my_block")
    if mode == "backward":
        x = rand(3).requires_grad_()
        out = region(wrap, x)
        w.add_(1)
        with pytest.raises(RuntimeError, match="my_block|modified by an inplace operation"):
            out.sum().backward()
    else:
        out, pullback = vjp(lambda x: region(wrap, x), rand(3))
        w.add_(1)
        with pytest.raises(RuntimeError, match="my_block|modified by an inplace operation"):
            pullback(out)


def test_mutation_message_names_what_was_mutated_and_the_way_out():
    w, x = rand(3), rand(3).requires_grad_()
    out = remat(lambda x, scale: torch.tanh(x * scale).exp(), name="my_block")(x, scale=w)
    w.zero_()
    with pytest.raises(RematError, match="(?s)my_block.*scale"):
        out.sum().backward()


# -- functions that do not replay ---------------------------------------------------------------------


def flips(first, second, mode):
    """A function that does `first` when it runs and `second` when it runs again."""
    runs = []

    def fn(x):
        runs.append(1)
        return (first if len(runs) == 1 else second)(x + unseen(x) if mode == "unseen" else x)

    return fn


@pytest.mark.parametrize(
    ("policy", "check", "calls", "mode"),
    crossed(FEW, ["metadata", "exact", "none"], [1, 2], ["backward", "vjp"]),
)
def test_ops_that_ran_run_again_and_no_python(policy, check, calls, mode):
    again = []

    def fn(x):
        if again:
            raise Mine("again")
        again.append(1)
        return torch.tanh(x.sin().exp() * scale[0]).cos()

    region = remat(fn, policy=POLICIES[policy], determinism_check=check)
    for _ in range(calls):
        x, scale = rand(3).requires_grad_(), [2.0]
        out, pull = vjp(region, x.detach()) if mode == "vjp" else (region(x), None)
        pull = pull or (lambda ct, out=out, x=x: torch.autograd.grad(out, x, ct, retain_graph=True))
        before = torch.get_rng_state()
        scale[0] = 3.0
        got = pull(torch.ones_like(out))
        same(got, torch.autograd.grad(torch.tanh(x.sin().exp() * 2.0).cos().sum(), x))
        same(pull(torch.ones_like(out)), got)
        assert again == [1] and torch.equal(before, torch.get_rng_state())
        again.clear()


# What runs first, what runs again, options, and what is told.
FLIPS = {
    "other ops": (
        lambda x: torch.tanh(x.sin().exp()) * 2,
        lambda x: torch.sigmoid(x.cos().exp()) * 2,
        {"policy": save_ops(torch.ops.aten.exp)},
        "aten",
    ),
    "other shapes": (
        lambda x: x.sin().exp().tanh().sum(),
        lambda x: x[:2].sin().exp().tanh().sum(),
        {},
        "",
    ),
    "fewer ops": (
        lambda x: x.sin().exp().tanh() * x.exp(),
        lambda x: x.sin(),
        {"policy": save_matmuls},
        "",
    ),
    "other values": (
        lambda x: (x * 1.0).sin().exp(),
        lambda x: (x * 2.0).sin().exp(),
        {"determinism_check": "exact"},
        "aten.mul",
    ),
    "parts of other sizes": (
        lambda x: x.sin().exp() * shrinks(torch.ones(3))[1].sum(),
        lambda x: x.sin().exp() * shrinks(torch.ones(3))[1].sum(),
        {},
        "remat_tests.shrinks",
    ),
    "another number": (
        lambda x: (x.sum() * 1.0).sin() * x.exp().sin(),
        lambda x: (x.sum() * 2.0).sin() * x.exp().sin(),
        {"determinism_check": "exact"},
        "aten.mul",
    ),
}


@RUN_AGAIN
@pytest.mark.parametrize("kind", FLIPS)
def test_a_replay_that_differs_is_told(mode, kind):
    first, second, options, told = FLIPS[kind]
    with pytest.raises(RematError, match=f"(?s)my_block.*{told}"):
        run(mode, remat(flips(first, second, mode), name="my_block", **options))
    if kind == "other values":  # by the user's word
        run(mode, remat(flips(first, second, mode), determinism_check="none"))


@MODES
@pytest.mark.parametrize("check", ["metadata", "exact", "none"])
def test_checks_pass_where_the_function_replays(mode, check):
    region = remat(lambda x: torch.tanh(torch.dropout(x.sin(), 0.5, True)).exp(), determinism_check=check)
    if mode != "vmap_grad":
        run(mode, region)
    run(mode, remat(lambda x: x.sin().exp(), determinism_check=check))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.exp().sum().sin(),
        lambda x: (torch.fft.fft(x).conj() * x).imag.exp().sin(),
        lambda x: torch.where(x.exp() > 1, x.bfloat16().sin().double(), x[:0].sum())[None].t().exp(),
    ],
    ids=["number", "complex", "others"],
)
def test_exact_check_takes_every_tensor(fn):
    run("backward", remat(fn, determinism_check="exact"))


TIMES = [0]


@torch.library.custom_op("remat_tests::drifts", mutates_args=())
def drifts(x: torch.Tensor) -> torch.Tensor:
    """Twice the same call gives two results."""
    TIMES[0] += 1
    return x * TIMES[0]


drifts.register_autograd(lambda ctx, g: g)


def test_exact_check_finds_an_op_that_gives_other_numbers_in_plain_autograd():
    fn = lambda x: drifts(x).sin().exp()  # noqa: E731
    with pytest.raises(RematError, match="(?s)my_block.*remat_tests.drifts"):
        run("backward", remat(fn, determinism_check="exact", name="my_block"))
    run("backward", remat(fn, determinism_check="metadata"))


@torch.library.custom_op("remat_tests::shrinks", mutates_args=())
def shrinks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the same call gives results of two sizes."""
    TIMES[0] += 1
    return x.sum(), x[: 2 + TIMES[0] % 2].clone()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: shrinks(x.detach())[1].sin() * x[:1].exp(),
        lambda x: (shrinks(x.detach())[1] + x[: 2 + TIMES[0] % 2]).sin().exp(),
    ],
    ids=["saved", "read"],
)
def test_an_op_that_gives_other_sizes_is_named_in_every_call(fn):
    TIMES[0] = 0
    region = remat(fn, name="my_block")
    for _ in range(3):
        with pytest.raises(RematError, match=r"(?s)my_block.*aten\.(sin|add).*test_errors.py:\d+"):
            region(rand(3, 3).requires_grad_()).sum().backward()


# -- results that outlive their level -----------------------------------------------------------------


def test_result_used_after_its_level_is_gone():
    """As without remat: the number is there, the derivative is not."""
    leaked = []
    region = remat(lambda x: x.sin().exp(), policy=save_nothing)

    def loss(x):
        leaked.append(region(x))
        return leaked[0].sum()

    grad(loss)(rand(3))
    same(leaked[0] * 1, rand(3).sin().exp(), 0.0)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(leaked[0].sum(), rand(3).requires_grad_())


def test_captured_tensor_whose_level_is_gone():
    leaked = []
    grad(lambda x: (leaked.append(x * 2), x.sum())[1])(rand(3))
    region = remat(lambda x: torch.exp(x * leaked[0]))
    same(grad(lambda x: region(x).sum())(rand(3)), grad(lambda x: torch.exp(x * leaked[0]).sum())(rand(3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempted to insert")
def test_a_linearized_function_inside_a_region_is_refused_in_words():
    """Torch loses the derivatives of what it folds into the graph, without remat too."""

    def inside(x):
        out, push = torch.func.linearize(torch.sin, x)
        return out + push(x.cos())

    with pytest.raises(RematError, match=r"torch\.func\.linearize"):
        grad(lambda x: grad(lambda x: remat(inside)(x).sum())(x).sum())(rand(3))
