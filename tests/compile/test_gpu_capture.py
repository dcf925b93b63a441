"""What keeps a step that is compiled for a GPU out of CUDA graphs, and its wrapper from being C++."""

import pytest
import torch
from torch._inductor import config

from remat import offload, remat, save_matmuls
from remat.gpu import compile_for
from tests.compile.test_gpu import triton as triton  # a fixture

pytestmark = pytest.mark.slow


@torch.library.custom_op("remat_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unsafe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def told(x):
    return unsafe(x.detach()).sum() + x.sum()


def masked(x):
    y = x.sin()
    y[y.detach() > 0] = 0.0
    return y.sum()


STATISTICS = torch.zeros(16, device="meta")


def writing(x):
    STATISTICS.add_(x.detach().sum(0))
    return x.sin().sum()


def offloading(x):
    return remat(lambda x: (x @ x.T).sin(), policy=offload(save_matmuls))(x).sum()


class Statistics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x).sin().sum()


def report(step):
    return compile_for(
        "h100", step, torch.empty(8, 16, device="meta", requires_grad=True), machine_code=False
    )


@pytest.mark.parametrize(
    ("step", "forward", "backward"),
    [
        (told, "remat_tests.unsafe.default, at ", ""),
        (masked, "aten.index_put", "aten.index_put"),  # since 2.14 not the one that writes in place
        (writing, "a write to an argument, at ", ""),
        (offloading, "host memory in remat.send.default, at ", "host memory in remat.fetch.default, at "),
    ],
)
def test_the_reason_is_told_with_its_line(triton, step, forward, backward):
    found = report(step)
    assert found.forward and found.backward
    for graph, expected in ((found.forward, forward), (found.backward, backward)):
        assert graph.not_capturable.startswith(expected) and bool(expected) == bool(graph.not_capturable)
        assert not expected or "test_gpu_capture.py:" in graph.not_capturable
        assert "\n" not in graph.not_capturable


def test_no_part_is_captured_beside_what_travels(triton, monkeypatch):
    """Torch cuts a graph around ops that cannot be captured. A part copies what it is given as it begins:
    host memory, which it refuses, or a fetched value that is still on its way."""
    from torch._inductor.graph import GraphLowering

    reasons, codegen = [], GraphLowering.codegen

    def noting(graph):
        reasons.append(graph.disable_cudagraphs_reason or "")
        return codegen(graph)

    monkeypatch.setattr(GraphLowering, "codegen", noting)
    with config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        report(offloading)
        report(told)
    assert [bool(reason) for reason in reasons] == [True, True, False, False], reasons


def test_what_a_region_returns_behind_what_it_sends_is_no_copy(triton):
    def block(x):
        return x + (x @ x.T).sin() @ x

    def step(x):
        run = remat(block, policy=offload(save_matmuls))
        return run(run(x)).square().sum()

    found = report(step)
    assert found.forward
    ops = [kernel.name for kernel in found.forward.kernels if "remat" in kernel.name]
    assert ops == ["remat.send"] * 4


def test_buffers_of_modules_may_be_written_to(triton):
    """They have the same address in every call."""
    found = report(Statistics().to("meta"))
    assert not found.not_capturable
