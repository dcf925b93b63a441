"""Variables and attributes that are bound anew between forward and pull-back change no derivative."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import remat, save_matmuls

FUNC = torch.func
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LAYER: Any = None
SCALE = 1.0
Wrap = Callable[[Any], Any]


class Settings:
    scale = 1.0


CONFIG: Any = types.ModuleType("config")


def layers() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()


def cell(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    for layer in net:
        x = r(lambda x: torch.tanh(layer(x)))(x)  # noqa: B023
    return x


def cell_numbers(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    for scale, name in ((0.5, "sin"), (2.0, "cos"), (3, "exp")):
        x = r(lambda x: getattr(torch, name)(net[0](x) * scale))(x)  # noqa: B023
    return x


def cell_function(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    for f in (torch.sin, net[1].forward, lambda x: x.exp() * 0.1):
        x = r(lambda x: f(net[0](x)))(x)  # noqa: B023
    return x


def global_module(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    global LAYER, SCALE

    def block(x: Tensor) -> Tensor:
        return torch.tanh(LAYER(x) * SCALE)

    for i, LAYER in enumerate(net):  # noqa: B007
        SCALE = i + 0.5
        x = r(block)(x)
    LAYER = None
    return x


def class_and_module(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return torch.tanh(net[0](x) * Settings.scale + CONFIG.shift)

    for i in range(3):
        Settings.scale = 1.0 + i
        CONFIG.shift = 0.1 * i
        x = r(block)(x)
    return x


def attribute(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    class Runner:
        layer: Any
        scale: float

        def run(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x) * self.scale)

    runner: Any = Runner()
    block = r(runner.run)
    for i, layer in enumerate(net):
        runner.layer, runner.scale = layer, i + 1
        x = block(x)
    return x


def training(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False).double()
    drop = nn.Sequential(nn.Dropout(1.0), norm)
    for on in (False, True, False):
        drop.train(on)
        x = r(lambda x: drop(net[0](x)) + x)(x)
    return x


def submodule(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    holder: Any = nn.Module()
    block = r(lambda x: torch.tanh(holder.layer(x)))
    for layer in net:
        holder.layer = layer
        x = block(x)
    return x


def counter(net: nn.ModuleList, x: Tensor, r: Wrap) -> Tensor:
    """The function itself binds it anew, once a call."""
    seen: Any = types.SimpleNamespace(calls=0)

    def block(x: Tensor) -> Tensor:
        seen.calls += 1
        return torch.tanh(net[0](x) * seen.calls)

    wrapped = r(block)
    return wrapped(wrapped(x)) * seen.calls


_CELLS = (cell, cell_numbers, cell_function)
_OTHERS = (global_module, class_and_module, attribute, training, submodule, counter)
PROGRAMS: dict[str, Any] = {f.__name__: f for f in (*_CELLS, *_OTHERS)}


def run(program: Any, r: Wrap, transform: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            return program(self.layers, x, r).square().mean()

    net = Net()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: Any) -> Tensor:
        return FUNC.functional_call(net, params, (X,))

    if transform == "backward":
        net(X).backward()
        return [p.grad for p in net.parameters()]
    if transform == "grad":
        return [FUNC.grad(loss)(params) for _ in range(2)]
    if transform == "jvp":
        return FUNC.jvp(loss, (params,), (params,))
    if transform == "jacfwd of grad":
        return FUNC.jvp(FUNC.grad(loss), (params,), (params,))[1]
    return FUNC.vmap(FUNC.grad(loss))({n: torch.stack([p, p * 2]) for n, p in params.items()})


@pytest.mark.parametrize("wrap", ["plain", pytest.param("matmuls", marks=pytest.mark.slow), "nested"])
@pytest.mark.parametrize("transform", ["backward", "grad", "jvp", "jacfwd of grad", "vmap(grad)"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_is_as_without_remat(program: str, transform: str, wrap: str) -> None:
    wraps: dict[str, Wrap] = {
        "plain": remat,
        "matmuls": lambda f: remat(f, policy=save_matmuls),
        "nested": lambda f: remat(lambda x: remat(f)(x * 1)),
    }
    want = run(PROGRAMS[program], lambda f: f, transform)
    torch.testing.assert_close(run(PROGRAMS[program], wraps[wrap], transform), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "counter"])
def test_where_the_function_runs_again_as_a_whole(program: str) -> None:
    """Not so what it binds itself (`counter`): that is noted once its forward is over."""

    def shows(f: Any) -> Any:
        def block(x: Tensor) -> Tensor:
            y = f(x)
            return y + torch.from_numpy(y.detach().numpy() * 0)

        return remat(block)

    want = run(PROGRAMS[program], lambda f: f, "backward")
    torch.testing.assert_close(run(PROGRAMS[program], shows, "backward"), want)
