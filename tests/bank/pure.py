"""Programs that compute: nothing is written, drawn or stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.bank.library import Doubled, SavesOutput, Twin, checkpoint_name, grid, run_chain
from tests.bank.program import program


@program("PURE")
def sine(m, x, y):
    return torch.sin(x)


@program("PURE")
def product_and_tanh(m, x, y):
    return torch.tanh(x @ m.w)


@program("PURE")
def gelu_of_linear(m, x, y):
    return F.gelu(m.lin(x))


@program("PURE")
def relu_less_other(m, x, y):
    return F.relu(x) - y


@program("PURE")
def gated(m, x, y):
    return x * y.sigmoid()


@program("PURE")
def half_of_other(m, x, y):
    return x + 0.5 * y


@program("PURE")
def constants_computed_from_full(m, x, y):
    return x * torch.full((1,), 0.3, dtype=x.dtype).cos() + y * torch.full((1,), 0.3, dtype=x.dtype).sin()


@program("PURE")
def constants_from_a_stack(m, x, y):
    t = torch.stack([torch.ones(1, dtype=x.dtype), torch.ones(1, dtype=x.dtype)])
    return (x * t[0].exp()).tanh() * t[1]


@program("PURE")
def quotient(m, x, y):
    return x / (1 + y**2)


@program("PURE")
def softmax(m, x, y):
    return x.softmax(-1)


@program("PURE")
def layer_norm(m, x, y):
    return F.layer_norm(x, (4,), m.scale)


@program("PURE")
def weight_used_twice(m, x, y):
    return F.linear(torch.tanh(x @ m.w), m.w)


@program("PURE")
def mlp(m, x, y):
    return m.mlp(x)


@program("PURE")
def tied_weights(m, x, y):
    return m.tied(x).cos()


@program("PURE")
def halves_exchanged(m, x, y):
    return torch.cat([x[:, 2:], y[:, :2].sin()], 1)


@program("PURE")
def unbound_and_stacked(m, x, y):
    return torch.stack([t.exp() for t in x.tanh().unbind(1)], 1)


@program("PURE")
def sum_expanded(m, x, y):
    return x.sum(0, keepdim=True).sin().expand_as(y)


@program("PURE")
def maximum_of_columns(m, x, y):
    return x.max(0, keepdim=True)[0] * y


@program("PURE", "decisions")
def largest_two(m, x, y):
    return x.topk(2, dim=1)[0].repeat(1, 2)


@program("PURE")
def permuted_by_indices(m, x, y):
    return x[:, torch.tensor([1, 0, 3, 2])].exp().tanh()


@program("PURE", "decisions")
def chosen_by_sign(m, x, y):
    return torch.where(x > 0, x, y.sin())


@program("PURE")
def cumulative_sum(m, x, y):
    return torch.cumsum(x, 1).sin()


@program("PURE")
def attention(m, x, y):
    return F.scaled_dot_product_attention(x[None, None], y.sin()[None, None], x[None, None])[0, 0]


@program("PURE")
def batched_products(m, x, y):
    return torch.tanh(torch.bmm(x.view(-1, 2, 2), y.reshape(-1, 2, 2))).flatten(1)


@program("PURE")
def einsum(m, x, y):
    return torch.einsum("ri,ij->rj", x, m.w).sin()


@program("PURE", "names")
def named_product(m, x, y):
    return checkpoint_name(torch.tanh(x @ m.w), "h")


@program("PURE")
def own_detached(m, x, y):
    return x * x.detach()


@program("PURE")
def without_grad_inside(m, x, y):
    with torch.no_grad():
        t = x.sin().exp()
    return x * t


@program("PURE")
def normalized(m, x, y):
    return F.normalize(x, dim=1, eps=1e-3)


@program("PURE", "decisions")
def sorted_rows(m, x, y):
    return x.sort(dim=1)[0] * y


@program("PURE")
def logsumexp(m, x, y):
    return torch.logsumexp(x, 1, keepdim=True) + y


@program("PURE")
def transposed_and_back(m, x, y):
    return x.t().sin().contiguous().t() * y


@program("PURE")
def triangle(m, x, y):
    return torch.tril(torch.tanh(x.t() @ y))[:1] + x


@program("PURE")
def fourier(m, x, y):
    return torch.fft.fft(x).real.tanh()


@program("PURE")
def complex_product(m, x, y):
    return torch.view_as_real(torch.complex(x, y).conj() * torch.complex(y, x)).sum(-1).tanh()


@program("PURE")
def unsafe_chunks(m, x, y):
    t = torch.unsafe_chunk(x.sin(), 2, 1)
    return torch.cat([t[1].exp(), t[0]], 1)


@program("PURE")
def chunks(m, x, y):
    t, t2 = x.chunk(2, 1)
    return torch.cat([t * t2, t2.sin()], 1)


@program("PURE")
def table_by_rows(m, x, y):
    return x * m.table[torch.arange(len(x)) % 5].sin()


@program("PURE")
def scaled_by_attributes(m, x, y):
    return x * m.factor + y * m.offset


@program("PURE")
def chain_of_functions(m, x, y):
    return run_chain([torch.sin, torch.tanh], x)


@program("PURE", "containers")
def nested_containers(m, x, y):
    t: dict[str, Any] = dict(h=x, rest=[y, (None, 2)])
    return t["h"].sin() * t["rest"][1][1]


@program("PURE")
def strided_window(m, x, y):
    return x.as_strided((2, 4), (4, 1)).sin().sum() + y


@program("PURE")
def bias_and_product(m, x, y):
    return torch.addmm(m.scale, x.cos(), m.w)


@program("PURE")
def embedding(m, x, y):
    return nn.functional.embedding(torch.arange(len(x)) % 5, m.table) * x


@program("PURE")
def called_with_other_weights(m, x, y):
    return torch.func.functional_call(m.lin, dict(weight=m.w.sin()), (x,)).tanh()


@program("PURE")
def grid_of_rows(m, x, y):
    return grid(len(x), x.dtype) * x.sin()


@program("FUNCTIONS", "functions")
def function_with_all_rules(m, x, y):
    return Doubled.apply(x)


@program("FUNCTIONS", "functions")
def function_saving_its_result(m, x, y):
    return SavesOutput.apply(x)


@program("FUNCTIONS", "functions")
def function_with_two_results(m, x, y):
    return Twin.apply(x, y)[0]
