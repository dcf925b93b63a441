"""Compiled regions that read what is in memory from outside, and then put something else there: FP8 scales,
queues, statistics. A partitioner takes a buffer for free to save, and for what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from remat import remat, save_matmuls, save_nothing, save_ops
from tests.compiled import compiled
from tests.helpers import crossed

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
START = torch.arange(1.0, 5.0, dtype=torch.float64)
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "exponentials": save_ops(torch.ops.aten.exp),
}


class Overwritten(torch.nn.Module):
    """Scales by what a buffer was, and overwrites it by `write(buffer, rows' mean)`."""

    state: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], Any], results: int = 1) -> None:
        super().__init__()
        self.write, self.results = write, results
        self.weight = torch.nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        self.register_buffer("state", START.clone())

    def forward(self, x: Tensor) -> Any:
        old = self.state.clone()
        self.write(self.state, x.detach().mean(0) + 3)
        out = torch.tanh((x * old.sqrt()).exp() @ self.weight)
        return out if self.results == 1 else (x.cos().sum(), out)


def shifted(queue: Tensor, new: Tensor) -> None:
    queue[1:] = queue[:-1].clone()
    queue[0] = new[0]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copied": lambda state, new: state.copy_(new),
    "data": lambda state, new: state.data.copy_(new),
    "filled": lambda state, new: state.fill_(2.5),
    "zeroed": lambda state, new: state.zero_(),
    "averaged": lambda state, new: state.copy_(0.9 * state + 0.1 * new),
    "queue": shifted,
    "rows": lambda state, new: state.index_copy_(0, torch.arange(4), new),
    "set": lambda state, new: state.__setitem__(slice(None), new),
    "out": lambda state, new: torch.mul(new, 2, out=state),
    "masked": lambda state, new: state.masked_fill_(state > 0, 7.0),
}


def single(module: Any, region: Any) -> Any:
    return region


def second_result(module: Any, region: Any) -> Any:
    module.results = 2
    return lambda x: region(x)[1]


def overwritten_once_more(module: Any, region: Any) -> Any:
    def step(x: Tensor) -> Tensor:
        out = region(x)
        module.state.copy_(x.detach()[0].abs())
        return out

    return step


def called_twice(module: Any, region: Any) -> Any:
    return lambda x: region(region(x).cos())


def read_after(module: Any, region: Any) -> Any:
    return lambda x: region(x) * module.state.clone()


def inside_another(module: Any, region: Any) -> Any:
    return remat(lambda x: region(x.sin()).cos())


USES = (single, second_result, overwritten_once_more, called_twice, read_after, inside_another)


def steps(write: str, use: Any, wrap: Any, compiler: Any) -> list[Tensor]:
    """Loss, gradients and buffer of two steps."""
    module = Overwritten(WRITES[write])
    step = compiler(use(module, wrap(module)))
    found = []
    for shift in range(2):
        x = (X + shift).requires_grad_()
        out = step(x)
        grads = torch.autograd.grad(out.sin().sum(), (x, module.weight))
        found += [out.detach(), *grads, module.state.clone()]
    return found


def partitioned(fn: Any) -> Any:
    """`fn` compiled as far as Inductor's partitioner, with all inputs free to save, as buffers are to it."""

    def partition(module: Any, inputs: Any, **options: Any) -> Any:
        options["static_lifetime_input_indices"] = list(range(10))
        return min_cut_rematerialization_partition(module, inputs, **options)

    def run(module: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    # Inductor's decompositions leave out what is overwritten.
    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=table)
    return compiled(fn, backend)


def check(write: str, use: Any, policy: Any, compiler: Any) -> None:
    expected = steps(write, use, lambda fn: fn, lambda fn: fn)
    made = steps(write, use, lambda fn: remat(fn, policy=policy), compiler)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("policy", "write"), crossed(POLICIES, WRITES, every=4))
def test_the_recomputation_reads_what_was_there_before(write: str, policy: str) -> None:
    check(write, single, POLICIES[policy], partitioned)


@config.patch(aggressive_recomputation=True)
def test_a_kept_value_is_not_computed_again_by_a_partitioner_that_keeps_little() -> None:
    check("copied", single, POLICIES["exponentials"], partitioned)


@pytest.mark.parametrize(("use", "policy"), crossed(USES[1:], ("nothing", "matmuls"), every=2))
def test_whatever_becomes_of_the_memory_later(use: Any, policy: str) -> None:
    check("copied", use, POLICIES[policy], partitioned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "write"), crossed(("nothing", "matmuls"), ["copied", "averaged", "queue", "out"], every=4)
)
def test_inductor_reads_what_was_there_before(write: str, policy: str) -> None:
    check(write, single, POLICIES[policy], lambda fn: compiled(fn, "inductor"))


@pytest.mark.slow
@pytest.mark.parametrize("use", USES[1::3])
def test_inductor_whatever_becomes_of_the_memory_later(use: Any) -> None:
    check("queue", use, save_nothing, lambda fn: compiled(fn, "inductor"))
