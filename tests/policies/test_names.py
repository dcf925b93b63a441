"""checkpoint_name and the policies that speak of names: in every transform, nested, misspelt, barred."""

import warnings

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import RematError, checkpoint_name, checkpoint_policy, debug, remat, saved_residuals
from remat.policies import offload, save_all_but_names, save_everything, save_matmuls, save_names
from tests.helpers import OpCounter, crossed, leaves_of, rand, same
from tests.policies.inside import UnmatchedName, _selector


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(_selector, "_warned", set())


def layer(x, w):
    h = checkpoint_name(torch.tan(x @ w), "hidden")
    return checkpoint_name({"out": torch.exp(h), "index": 3}, "result")["out"]


X, W = rand(3, 4), rand(4, 4)


def loss(fn):
    return lambda *args: fn(*args).sum()


def backward(fn, x, w):
    return torch.autograd.grad(fn(*(leaves := leaves_of((x, w)))).sum(), leaves)


# Each recomputes all but what is kept; torch runs these ops so often where nothing is.
REVERSE = {
    "backward": (backward, 2),
    "grad": (lambda fn, x, w: grad(loss(fn), (0, 1))(x, w), 2),
    "grad_grad": (lambda fn, x, w: grad(lambda x: grad(loss(fn))(x, w).sin().sum())(x), 3),
    "vmap_grad": (lambda fn, x, w: vmap(grad(loss(fn)), (0, None))(x[:, None], w), 2),
    "grad_vmap": (lambda fn, x, w: grad(lambda x: vmap(fn, (0, None))(x, w).sum())(x), 2),
    "jacrev": (lambda fn, x, w: jacrev(fn)(x, w), 2),
    "grad_jvp": (lambda fn, x, w: grad(lambda x: jvp(lambda x: fn(x, w), (x,), (x,))[1].sum())(x), 2),
    "jacfwd_grad": (lambda fn, x, w: jacfwd(grad(loss(fn)))(x, w), 2),
    "hessian": (lambda fn, x, w: hessian(loss(fn))(x, w), 2),
}


def equal(transform, policy):
    """Whether a transform of the region gives what it gives without names; and the ops that ran."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        with OpCounter() as ops:
            got = transform(remat(layer, policy=policy), X, W)
        torch.testing.assert_close(got, transform(lambda x, w: torch.exp(torch.tan(x @ w)), X, W))
    return ops["tan"], ops["exp"]


@pytest.mark.parametrize("transform", REVERSE)
def test_names_are_seen_under_transforms(transform):
    """A saved name keeps its value from being computed again, a barred one does not, whatever is around."""
    run, n = REVERSE[transform]
    assert equal(run, []) == (n, n)
    assert equal(run, save_names("hidden")) == (1, n)
    assert equal(run, save_names("hidden", "result")) == (1, 1)
    assert equal(run, save_all_but_names("hidden")) == (n, 1)
    assert equal(run, save_all_but_names("hidden", "result")) == (n, n)


def test_names_survive_nesting():
    """An outer policy sees the names given in regions inside it."""
    inner = remat(layer, name="inner")
    outer = remat(lambda x, w: inner(torch.sin(x), w), policy=save_names("hidden"))
    # The tangent is kept by the outer region and shared with the inner one.
    leaves = leaves_of((X, W))
    out = outer(*leaves)
    with OpCounter() as ops:
        out.sum().backward()
    assert ops["tan"] == 0
    assert "hidden" in [r.name for r in saved_residuals(outer, X, W) if r.why == "policy"]


def test_names_survive_modules_and_functional_call():
    class Named(torch.nn.Linear):
        def forward(self, input):
            return checkpoint_name(super().forward(input), "projected").tan()

    model = Named(4, 4).double()
    region = remat(lambda p, x: functional_call(model, p, (x,)), policy=save_names("projected"))
    found = saved_residuals(region, dict(model.named_parameters()), X)
    assert [r.name for r in found if r.why == "policy"] == ["projected"]


def test_two_names_of_one_value():
    def fn(x):
        return checkpoint_name(checkpoint_name(x.tan(), "a"), "b").exp().sin()

    for name in ("a", "b"):
        with OpCounter() as ops:
            backward_of(remat(fn, policy=save_names(name)))
        assert ops["tan"] == 1


def backward_of(fn):
    fn(X.clone().requires_grad_()).sum().backward()


# -- names that match nothing -------------------------------------------------------------------------

MODES = pytest.mark.parametrize(
    "run",
    [
        lambda fn: backward(fn, X, W),
        lambda fn: grad(loss(fn))(X, W),
        lambda fn: vmap(grad(loss(fn)), (0, None))(X[:, None], W),
        lambda fn: grad(lambda x: vmap(fn, (0, None))(x, W).sum())(X),
    ],
    ids=["backward", "grad", "vmap_grad", "grad_vmap"],
)


@MODES
def test_unmatched_names_warn_once_with_the_nearest_spelling(run):
    region = remat(layer, policy=save_names("hiden", "result"), name="block")
    with pytest.warns(UnmatchedName) as caught:
        run(region)
        run(region)
    (warning,) = caught
    text = str(warning.message)
    assert "save_names('hiden', 'result') of region 'block' asks for 'hiden'" in text
    assert "'hidden', 'result'" in text and "Did you mean 'hidden' for 'hiden'?" in text
    assert warning.filename == __file__


@MODES
def test_strict_names_raise(run):
    region = remat(layer, policy=save_matmuls | save_names("hiden", strict=True))
    with pytest.raises(RematError, match="Did you mean 'hidden'"):
        run(region)
    # Nothing is left behind: the same region with the right name works.
    run(remat(layer, policy=save_matmuls | save_names("hidden", strict=True)))


def test_a_region_without_any_name_says_so():
    with pytest.warns(UnmatchedName, match="no checkpoint_name was called in it"):
        backward_of(remat(lambda x: x.tan(), policy=save_names("q")))


def test_every_region_warns_for_itself():
    with pytest.warns(UnmatchedName) as caught:
        for name in ("first", "second", "first"):
            backward_of(remat(lambda x: x.tan(), policy=save_all_but_names("q"), name=name))
    assert len(caught) == 2


def test_names_are_searched_in_combinations_and_all_of_them_are_listed():
    policy = (save_matmuls | ~save_names("a")) & save_all_but_names("b", "hidden")
    with pytest.warns(UnmatchedName, match="asks for 'a', 'b', which"):
        backward(remat(layer, policy=policy), X, W)


def test_matched_names_do_not_warn():
    backward(remat(layer, policy=save_names("hidden") | save_names("result", strict=True)), X, W)


# -- barred names -------------------------------------------------------------------------------------


def kept(fn, *args):
    return [str(r.op) for r in saved_residuals(fn, *args) if r.op is not None]


def test_a_barred_value_is_recomputed():
    """JAX's save_anything_except_these_names leaves the value with everything else that is saveable."""

    def fn(x):
        return torch.tanh(checkpoint_name(torch.exp(x.sin()), "barred")).sum()

    assert kept(fn, X) == ["aten.exp.default", "aten.tanh.default"]
    region = remat(fn, policy=save_all_but_names("barred"))
    assert kept(region, X) == ["aten.sin.default", "aten.tanh.default"]
    leaf = X.clone().requires_grad_()
    out = region(leaf)
    with OpCounter() as ops:
        out.backward()
    assert (ops["exp"], ops["sin"], ops["tanh"]) == (1, 0, 0)


@pytest.mark.parametrize(
    "view", [lambda t: t.view(-1), lambda t: t.t(), lambda t: t], ids=["flat", "t", "no"]
)
def test_a_barred_view_bars_what_it_is_a_view_of(view):
    def fn(x):
        return checkpoint_name(view(torch.exp(x)), "barred").cos().sum()

    assert kept(remat(fn, policy=save_all_but_names("barred")), X) == []
    assert kept(remat(fn, policy=save_everything), X) != []


LOOKS = {
    "flat": lambda h: h.view(-1).log1p().sum(),
    "transposed": lambda h: h.t().log1p().sum(),
    "row": lambda h: h[0].log1p().sum(),
    "expanded": lambda h: h.expand(2, 3, 4).log1p().sum(),
    "operand": lambda h: (h @ h.t()).sum(),
    "look at a look": lambda h: h.t()[1:].log1p().sum(),
}


@pytest.mark.parametrize(
    ("look", "written", "policy"),
    crossed(
        LOOKS,
        [False, True],
        [save_all_but_names("barred"), checkpoint_policy(lambda info: info.name != "barred")],
    ),
)
def test_looks_at_a_barred_value_do_not_keep_it(look, policy, written):
    def fn(x):
        h = torch.sub(x.sin(), -3)
        if written:
            h.mul_(2)
        return LOOKS[look](checkpoint_name(h, "barred"))

    region = remat(fn, policy=policy)
    # What it is computed again of: the value before the write is another, which no name bars.
    assert kept(region, X) == ["aten.sub.Tensor" if written else "aten.sin.default"]
    expected = grad(fn)(X)
    for run in (grad(region), lambda x: torch.autograd.grad(region(leaf := leaves_of((x,))[0]), leaf)[0]):
        with OpCounter() as ops:
            got = run(X)
        torch.testing.assert_close(got, expected)
        assert (ops["sub"], ops["mul_"], ops["sin"]) == ((1, 2, 1) if written else (2, 0, 1))


@pytest.mark.parametrize("look", ["row", "look at a look"])
def test_looks_at_a_barred_value_do_not_keep_it_in_a_graph(look):
    torch._dynamo.reset()
    region = remat(
        lambda x: LOOKS[look](checkpoint_name(torch.exp(x.sin()), "barred")),
        policy=save_all_but_names("barred"),
        name="block",
    )
    (found,) = debug.recomputed(torch.compile(region, backend="aot_eager"), X.clone().requires_grad_())
    assert found.ops["exp"] == 1 and found.ops["sin"] == 0 and not found.lost


def test_a_barred_part_leaves_the_whole():
    def fn(x):
        h = torch.exp(x)
        return checkpoint_name(h[0], "barred").cos().sum() + h.cos().sum()

    assert kept(remat(fn, policy=save_all_but_names("barred")), X) == ["aten.exp.default"]


def test_another_policy_may_save_what_a_name_bars():
    def fn(x, w):
        return checkpoint_name(x @ w, "barred").sin().sum()

    policy = save_all_but_names("barred")
    assert "aten.mm.default" not in kept(remat(fn, policy=policy), X, W)
    assert "aten.mm.default" in kept(remat(fn, policy=policy | save_matmuls), X, W)


def test_a_barred_value_under_torch_func():
    def fn(x):
        return torch.tanh(checkpoint_name(torch.exp(x.sin()), "barred")).sum()

    def exps(policy):
        with OpCounter() as ops:
            grad(remat(fn, policy=policy))(X)
        return ops["exp"], ops["sin"]

    assert exps(save_all_but_names("barred")) == (2, 1)
    # Under save_everything there is no region at all.
    assert exps(save_everything) == (1, 1)


# -- named values that were written in place ----------------------------------------------------------


@pytest.mark.parametrize("named_before", [False, True])
@pytest.mark.parametrize("mode", ["backward", "grad"])
def test_a_name_given_after_a_write_keeps_what_was_written(named_before, mode):
    def fn(x):
        h = torch.sin(x)
        if named_before:
            h = checkpoint_name(h, "h")
        h.mul_(2)
        if not named_before:
            h = checkpoint_name(h, "h")
        return torch.cos(h).sum()

    region = remat(fn, policy=save_names("h"))
    expected = torch.cos(X) * -torch.sin(2 * torch.sin(X)) * 2
    with OpCounter() as ops:
        got = (
            grad(region)(X) if mode == "grad" else torch.autograd.grad(region(x := leaves_of((X,))[0]), x)[0]
        )
    torch.testing.assert_close(got, expected)
    # The forward's sine and the derivative's. What was named before the write is kept, and written again.
    assert ops["sin"] == 2 and ops["mul_"] == (2 if named_before else 1)


# -- one of several results of an op ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["backward", "grad"])
@pytest.mark.parametrize("bars", [False, True])
def test_a_name_for_one_of_several_results(mode, bars):
    """The value is kept, or barred; the op's other results are not the name's matter."""

    def fn(x):
        values, _ = torch.max(torch.sin(x), -1)
        return torch.cos(checkpoint_name(values, "largest")).sum()

    region = remat(fn, policy=save_all_but_names("largest") if bars else save_names("largest"))
    expected = torch.autograd.grad(fn(x := leaves_of((X,))[0]), x)[0]
    got = grad(region)(X) if mode == "grad" else torch.autograd.grad(region(x), x)[0]
    torch.testing.assert_close(got, expected)
    shapes = [r.shape for r in saved_residuals(region, X) if r.why == "policy"]
    assert ((3,) in shapes) is not bars


LAZY = {"conj": lambda h: h.conj(), "adjoint": lambda h: h.mH, "negative": lambda h: h.conj().imag}


@pytest.mark.parametrize(
    ("look", "policy"), crossed(LAZY, [save_names("h"), offload(save_names("h"))], every=2)
)
def test_a_name_of_a_lazy_conjugate(look, policy):
    w = rand(4, 4)

    def loss(x):
        h = checkpoint_name(LAZY[look](torch.complex(x @ w, x)), "h")
        return (h.sin() * h).real.sum()

    region, x = remat(loss, policy=policy), rand(4, 4).requires_grad_()
    expected = torch.autograd.grad(loss(x), x)
    for _ in range(2):
        same(torch.autograd.grad(region(x), x), expected)
    same(torch.func.grad(region)(x.detach()), expected[0])
