"""Programs that compute: nothing is written, drawn or stored."""

from __future__ import annotations

from typing import Any

import torch

from tests.bank.library import Doubled
from tests.bank.program import expressions, program

expressions(
    "PURE",
    sine="torch.sin(x)",
    product_and_tanh="torch.tanh(x @ m.w)",
    gelu_of_linear="F.gelu(m.lin(x))",
    gated="x * y.sigmoid()",
    softmax="x.softmax(-1)",
    layer_norm="F.layer_norm(x, (4,), m.scale)",
    weight_used_twice="F.linear(torch.tanh(x @ m.w), m.w)",
    mlp="m.mlp(x)",
    tied_weights="m.tied(x).cos()",
    unbound_and_stacked="torch.stack([t.exp() for t in x.tanh().unbind(1)], 1)",
    sum_expanded="x.sum(0, keepdim=True).sin().expand_as(y)",
    maximum_of_columns="x.max(0, keepdim=True)[0] * y",
    permuted_by_indices="x[:, torch.tensor([1, 0, 3, 2])].exp().tanh()",
    attention="F.scaled_dot_product_attention(x[None, None], y.sin()[None, None], x[None, None])[0, 0]",
    batched_products="torch.tanh(torch.bmm(x.view(-1, 2, 2), y.reshape(-1, 2, 2))).flatten(1)",
    own_detached="x * x.detach()",
    normalized="F.normalize(x, dim=1, eps=1e-3)",
    transposed_and_back="x.t().sin().contiguous().t() * y",
    fourier="torch.fft.fft(x).real.tanh()",
    complex_product="torch.view_as_real(torch.complex(x, y).conj() * torch.complex(y, x)).sum(-1).tanh()",
    scaled_by_attributes="x * m.factor + y * m.offset",
    chain_of_functions="run_chain([torch.sin, torch.tanh], x)",
    strided_window="x.as_strided((2, 4), (4, 1)).sin().sum() + y",
    bias_and_product="torch.addmm(m.scale, x.cos(), m.w)",
    embedding="nn.functional.embedding(torch.arange(len(x)) % 5, m.table) * x",
    called_with_other_weights="torch.func.functional_call(m.lin, dict(weight=m.w.sin()), (x,)).tanh()",
    grid_of_rows="grid(len(x), x.dtype) * x.sin()",
)
expressions(
    "PURE",
    "decisions",
    largest_two="x.topk(2, dim=1)[0].repeat(1, 2)",
    chosen_by_sign="torch.where(x > 0, x, y.sin())",
    sorted_rows="x.sort(dim=1)[0] * y",
)
expressions(
    "PURE",
    "names",
    named_product="checkpoint_name(torch.tanh(x @ m.w), 'h')",
)
expressions(
    "FUNCTIONS",
    "functions",
    function_saving_its_result="SavesOutput.apply(x)",
    function_with_two_results="Twin.apply(x, y)[0]",
)


@program("PURE")
def constants_from_a_stack(m, x, y):
    t = torch.stack([torch.ones(1, dtype=x.dtype), torch.ones(1, dtype=x.dtype)])
    return (x * t[0].exp()).tanh() * t[1]


@program("PURE")
def without_grad_inside(m, x, y):
    with torch.no_grad():
        t = x.sin().exp()
    return x * t


@program("PURE")
def unsafe_chunks(m, x, y):
    t = torch.unsafe_chunk(x.sin(), 2, 1)
    return torch.cat([t[1].exp(), t[0]], 1)


@program("PURE")
def chunks(m, x, y):
    t, t2 = x.chunk(2, 1)
    return torch.cat([t * t2, t2.sin()], 1)


@program("PURE", "containers")
def nested_containers(m, x, y):
    t: dict[str, Any] = dict(h=x, rest=[y, (None, 2)])
    return t["h"].sin() * t["rest"][1][1]


@program("FUNCTIONS", "functions", found="jvp_grad/views")
def function_with_all_rules(m, x, y):
    return Doubled.apply(x)
