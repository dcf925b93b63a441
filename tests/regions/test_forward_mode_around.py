"""Forward-mode derivatives of a region: its ops cannot be compared, so its results and their tangents are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat
from tests.helpers import crossed, rand, same

Way = Callable[[Any, Tensor, Tensor], Any]


class Layer(nn.Module):
    """Attributes say by what it multiplies, and how much of the derivative it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.now = 0.0, {"scale": 1.0, "share": 1.0}  # items of containers are not put back
        self.bias = nn.Parameter(rand(4))  # which no backward reads

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(x @ weight, self.drop).sin() * self.now["scale"]
        return y * self.now["share"] + y.detach() * (1 - self.now["share"]) + self.bias, y.detach().cos()


def pushed(region: Any, x: Tensor, weight: Tensor) -> Any:
    made: Any = torch.func.jvp(lambda x: region(x, weight)[0], (x,), (x.cos(),))
    out, tangent = made
    return out.sum() + tangent.square().sum()


def pushed_alone(region: Any, x: Tensor, weight: Tensor) -> Any:
    return torch.func.jvp(lambda x: region(x, weight)[0], (x,), (x.cos(),))[1].square().sum()


def pushed_twice(region: Any, x: Tensor, weight: Tensor) -> Any:
    def once(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: region(x, weight)[0], (x,), (x.cos(),))[1]

    return torch.func.jvp(once, (x,), (x.sin(),))[1].square().sum()


def batched(region: Any, x: Tensor, weight: Tensor) -> Any:
    def one(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: region(x[None], weight)[0], (x,), (x.cos(),))[1]

    return torch.vmap(one, randomness="different")(x).square().sum()


def jacobian(region: Any, x: Tensor, weight: Tensor) -> Any:
    return torch.func.jacfwd(lambda x: region(x, weight)[0], randomness="same")(x).square().sum()


def hessian(region: Any, x: Tensor, weight: Tensor) -> Any:
    def loss(x: Tensor) -> Tensor:
        return region(x, weight)[0].square().sum()

    return torch.func.jacfwd(torch.func.jacrev(loss), randomness="same")(x).square().sum()


def pushed_through_grad(region: Any, x: Tensor, weight: Tensor) -> Any:
    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: region(x, weight)[0].square().sum())(x)

    return torch.func.jvp(gradient, (x,), (x.cos(),))[1].square().sum()


WAYS = [pushed, pushed_alone, pushed_twice, batched, jacobian, hessian, pushed_through_grad]


def stepped(region: Any, way: Way, change: Callable[[], Any] = lambda: None) -> Tensor:
    """The gradient of plain autograd over what `way` gives."""
    weight = rand(4, 4).requires_grad_()
    loss = way(region, rand(3, 4), weight)
    change()
    return torch.autograd.grad(loss, [weight])[0]


def nested(region: Any, way: Way, change: Callable[[], Any] = lambda: None) -> Tensor:
    """The same by torch.func."""
    x, weight = rand(3, 4), rand(4, 4)
    made: Any = torch.func.vjp(lambda weight: way(region, x, weight), weight)
    loss, pull = made
    change()
    return pull(torch.ones_like(loss))[0]


@pytest.mark.parametrize(
    ("way", "step", "name"), crossed(WAYS, [stepped, nested], ["scale", "share"], every=2)
)
def test_what_changes_before_the_backward_is_refused_or_does_not_matter(way, step, name):
    layer = Layer()
    region, change = remat(layer), lambda: layer.now.update({name: 0.9})
    if step is stepped and way not in (hessian, pushed_through_grad):  # ops run again, and no function
        torch.testing.assert_close(step(region, way, change), step(Layer(), way))
        return
    with pytest.raises(RematError, match="it returned other"):
        step(region, way, change)


@pytest.mark.parametrize("step", [stepped, nested])
def test_forward_mode_inside_a_region_under_another_transform(step):
    layer = Layer()
    inside = remat(lambda x, weight: (pushed(layer, x, weight), 0))

    def gradient(region: Any, x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(lambda x: region(x, weight)[0])(x).square().sum()

    step(inside, gradient)
    with pytest.raises(RematError, match="it returned other numbers"):
        step(inside, gradient, lambda: layer.now.update(scale=0.9))


def test_autocast_and_batches_in_other_places():
    layer, found = Layer(), []
    for region in (layer, remat(layer)):
        torch.manual_seed(3)
        weight = rand(4, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.vmap(lambda x, region=region, weight=weight: pushed(region, x, weight), in_dims=2)(
                rand(3, 4, 5)
            )
        found.append(torch.autograd.grad(out.sum(), [weight])[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


INSIDE = {
    "nothing": lambda f: f,
    "grad": lambda f: torch.func.grad(lambda a: f(a).sum()),
    "vmap": torch.func.vmap,
    "vjp": lambda f: lambda a: torch.func.vjp(f, a)[1](a.cos())[0],
}


@pytest.mark.parametrize("inside", INSIDE)
def test_a_backward_within_the_level_is_given_tangents_of_its_own(inside):
    def gradient(wrap: Callable[..., Any]) -> Any:
        x = rand(3, 4).requires_grad_()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.detach().cos())
            out = torch.layer_norm(INSIDE[inside](wrap(lambda a: a.sin() * a.tanh()))(dual), (4,))
            tangent: Any = torch.autograd.forward_ad.unpack_dual(out.sin()).tangent
            return torch.autograd.grad(tangent.sum(), x)[0].detach()

    same(gradient(remat), gradient(lambda f: f))
