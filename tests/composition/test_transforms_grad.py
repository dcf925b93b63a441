"""remat.transforms.grad and value_and_grad: torch.func's results, nothing kept."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from remat import remat
from remat.transforms import grad, value_and_grad
from tests.helpers import LiveBytes, custom, rand, same


def energy(params, x, power=2):
    return (torch.tanh(x @ params["w"]) ** power).sum() + params["b"].sum()


PARAMS = {"w": rand(3, 3), "b": rand(2), "unused": rand(4)}


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1, 0), (1,)])
def test_argnums_and_structures(argnums):
    args = PARAMS, rand(2, 3)
    same(grad(energy, argnums)(*args, power=3), torch.func.grad(energy, argnums)(*args, power=3))


def test_order_of_results():
    def with_aux(x):
        return x.sin().sum(), {"double": 2 * x, "text": "kept", "input": x}

    x = rand(3)
    value, grads = value_and_grad(lambda x: x.sin().sum())(x)
    same((value, grads), (x.sin().sum(), x.cos()))
    (value, aux), grads = value_and_grad(with_aux, has_aux=True)(x)
    same((value, aux["double"], grads), (x.sin().sum(), 2 * x, x.cos()))
    assert aux["text"] == "kept" and aux["input"] is x and not aux["double"].requires_grad
    grads, aux = grad(with_aux, has_aux=True)(x)
    same((grads, aux["double"]), (x.cos(), 2 * x))


def test_keeps_no_graph():
    w = rand(8, 8)

    def loss(x):
        for _ in range(4):
            x = torch.tanh(x @ w)
        return x.sum()

    peaks = {}
    for name, transform in (("ours", grad), ("torch", torch.func.grad)):
        peaks[name] = peak_bytes(transform(loss), rand(8, 8))
    # Four hidden values and a few gradients against all of them and the graph of the backward.
    assert peaks["ours"] <= 8 * 8 * 8 * 8 < peaks["torch"]


def peak_bytes(fn, *args):
    peak = 0

    class Peak(LiveBytes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal peak
            out = super().__torch_dispatch__(func, types, args, kwargs)
            peak = max(peak, self.bytes + out.nbytes if isinstance(out, torch.Tensor) else self.bytes)
            return out

    with Peak():
        fn(*args)
    return peak


def test_result_is_a_constant_where_nothing_outside_is_differentiated():
    value, grads = value_and_grad(lambda x: x.exp().sum())(rand(3))
    assert not value.requires_grad and not grads.requires_grad
    leaf = rand(3).requires_grad_()
    with torch.no_grad():
        assert not grad(lambda x: (x * leaf).exp().sum())(leaf).requires_grad


OUTSIDE = {
    "differentiated": lambda g, w: g(lambda w: (w**3).sum())(w),
    "argument": lambda g, w: g(lambda x, w: ((x * w) ** 2).sum())(rand(3, seed=1), w),
    "keyword": lambda g, w: g(lambda x, *, w: ((x * w) ** 2).sum())(rand(3, seed=1), w=w),
    "captured": lambda g, w: g(lambda x: ((x * w) ** 2).sum())(rand(3, seed=1)),
    "captured result": lambda g, w: (lambda h: g(lambda x: ((x * h) ** 2).sum())(rand(3, seed=1)))(w.sin()),
    "aux": lambda g, w: g(lambda x: (x.sum(), (x * w).sin()), has_aux=True)(rand(3, seed=1))[1],
    "inner": lambda g, w: g(lambda x: (g(lambda y: (x * y * w).sin().sum())(x) ** 2).sum())(rand(3, seed=1)),
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_derivatives_flow_to_tensors_outside(how):
    w = rand(3).requires_grad_()
    got, expected = (OUTSIDE[how](g, w) for g in (grad, torch.func.grad))
    same(got, expected)
    same(torch.autograd.grad(got.sum(), w), torch.autograd.grad(expected.sum(), w))


def test_inside_other_transforms():
    x = rand(2, 3)
    fn = lambda x: x.sin().prod()  # noqa: E731
    same(torch.vmap(grad(fn))(x), torch.vmap(torch.func.grad(fn))(x))
    same(
        grad(lambda x: grad(fn)(x).sum())(x[0]), torch.func.grad(lambda x: torch.func.grad(fn)(x).sum())(x[0])
    )
    same(torch.func.jacrev(grad(fn))(x[0]), torch.func.hessian(fn)(x[0]))
    same(torch.func.jvp(grad(fn), (x[0],), (x[1],)), torch.func.jvp(torch.func.grad(fn), (x[0],), (x[1],)))


def test_forward_mode_around():
    w, t = rand(3), rand(3, seed=1)

    def run(g):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(w, t)
            captured = forward_ad.unpack_dual(g(lambda x: (x * dual).sin().sum())(rand(3, seed=2)))
            direct = forward_ad.unpack_dual(g(lambda x: x.sin().sum())(dual))
            return tuple(captured), tuple(direct)

    same(run(grad), run(torch.func.grad))


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3)
        same(grad(lambda x: x.exp().sum())(x), torch.func.grad(lambda x: x.exp().sum())(x))


def test_arguments_are_left_as_they_are():
    x = rand(3)
    before = x.clone()
    grad(lambda x: (x.clone().mul_(2)).sum())(x)
    assert torch.equal(x, before) and not x.requires_grad and x.grad is None
    leaf = rand(3).requires_grad_()
    grad(lambda x: (x * leaf).sum())(x)
    assert leaf.grad is None


def test_zero_gradients_of_what_is_not_used():
    same(
        grad(lambda x, y: x.sum(), (0, 1))(rand(3), rand(2)),
        (torch.ones(3).double(), torch.zeros(2).double()),
    )
    same(grad(lambda x: torch.ones(()))(rand(3)), torch.zeros(3).double())


def test_compiled():
    fn = torch.compile(
        lambda x: value_and_grad(lambda x: x.sin().sum())(x), backend="aot_eager", fullgraph=True
    )
    same(fn(rand(3)), (rand(3).sin().sum(), rand(3).cos()))


def test_old_style_functions_are_differentiated_at_the_outermost_level():
    double = custom(lambda x: x * 2, lambda g, x: g * 2)
    same(grad(lambda x: remat(double)(x).sum())(rand(3)), torch.full((3,), 2.0).double())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: grad(lambda x: x)(rand(3)), RuntimeError, r"scalar tensor, got one of shape \(3,\)"),
        (lambda: grad(lambda x: 3.0)(rand(3)), RuntimeError, "scalar tensor, got 3.0"),
        (lambda: grad(lambda x: x.sum(), 1)(rand(3)), RuntimeError, "argnums=1.*1 positional"),
        (lambda: grad(lambda x: x.sum(), (0, 0))(rand(3)), RuntimeError, "unique"),
        (lambda: grad(lambda x: x.sum(), "x")(rand(3)), RuntimeError, "'x'"),  # type: ignore[arg-type]
        (lambda: grad(lambda x: x.sum())(x=rand(3)), RuntimeError, "Keyword"),
        (lambda: grad(lambda x: x * 2.0)(3.0), ValueError, "3.0"),
        (lambda: grad(lambda x: x.sum())(torch.ones(3, dtype=torch.int64)), RuntimeError, "floating point"),
        (lambda: grad(lambda x: x.sum(), has_aux=True)(rand(3)), RuntimeError, "has_aux"),
        (lambda: grad(lambda x: x.exp().sum())(rand(3, dtype=torch.complex128)), RuntimeError, "real"),
    ],
)
def test_mistakes_are_errors_as_in_torch_func(call, error, text):
    with pytest.raises(error, match=text):
        call()
