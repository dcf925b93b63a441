"""Programs of modules, contexts, autograd Functions and transforms inside."""

from __future__ import annotations

import torch

from tests.bank.library import Accumulates, Reversible
from tests.bank.program import expressions, program

expressions(
    "COMMON",
    "modules decisions",
    counted_argmax="x * torch.bincount(x.detach().argmax(1), minlength=4)",
    sorted_by_other="x.sin()[y.detach()[:, 0].argsort()].exp().tanh()",
)
expressions(
    "COMMON",
    "modules",
    weight_norm="m.weighted(x).sin()",
    parametrized_weight="m.parametrized(x)",
    multihead_attention="m.attention(x[None], x[None], x[None])[0][0]",
    cached_table="lookup(x.shape[1]).to(x.dtype) * x",
    identity_of_arguments="x.sin() if x is y else x.cos() * y",
)
expressions(
    "NESTED",
    "torch.func",
    gradient_inside="torch.func.grad(lambda t: m.mlp(t).sum())(x) * y",
    vmap_inside="torch.func.vmap(lambda t: m.lin(t).sin())(x)",
    jvp_inside="torch.func.jvp(lambda t: t.sin() * y, (x,), (y,))[1]",
)
expressions(
    "LEVELS",
    "numbers",
    branch_on_a_number="x.sin() if float(x.detach().sum()) > 0 else x.cos()",
    number_from_a_list="x * y.detach().sum(0).tolist()[0]",
)
expressions(
    "LEVELS",
    "modules",
    gru="m.gru(x[None])[0][0]",
    quantized_linear="m.quantized(x.detach().float()).to(x.dtype) * y",
)
expressions(
    "LEVELS",
    sparse_product="torch.sparse.mm(m.adjacency, x.t().sin()).t().contiguous()",
)
expressions(
    "LEVELS",
    "modules buffers",
    spectral_norm="m.spectral(x).tanh()",
)
expressions(
    "OLD",
    "functions",
    old_function="Old.apply(x)",
    attribute_on_a_context="Attribute.apply(x, y)",
    partly_saving_function="Partly.apply(x, y)[0]",
    custom_op_with_autograd="torch.ops.remat_fuzz.new_like(x) * y",
)
expressions(
    "OLD",
    "functions nests",
    checkpoint_of_torch_inside="checkpoint(lambda t: m.mlp(t).sin(), x, use_reentrant=False)",
)
expressions(
    "MEMORY",
    "memory",
    numpy_copy="x * torch.from_numpy(y.detach().sin().numpy().copy())",
    number_from_numpy="x * x.detach().numpy().mean()",
    numpy_custom_op="torch.ops.remat_fuzz.scaled(x, 2.0)",
    raw_fill="RawFill.apply(x)",
)
expressions(
    "EAGER",
    dirty_function="Dirty.apply(x.sin())",
)
expressions(
    "EAGER",
    "buffers modules",
    instance_norm="m.instance(x.t()[None])[0].t() if len(x) > 1 else x",
)
expressions(
    "INNER",
    "inner functions",
    layer_that_accumulates_in_its_backward="Accumulates.apply(m.mlp, x) * y",
)


@program("COMMON", "modules buffers")
def custom_op_writes(m, x, y):
    torch.ops.remat_fuzz.bump(m.steps)
    return x * m.steps.clamp(max=4.0)


@program("COMMON", "modules modes")
def autocast_inside(m, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        out = m.lin(x).sin().to(x.dtype)
    return out


@program("COMMON", "modules modes")
def autocast_off_inside(m, x, y):
    with torch.autocast("cpu", enabled=False):
        out = (x @ m.w).sin()
    return out


@program("LEVELS", "sizes")
def boolean_mask(m, x, y):
    out = x.clone()
    out[y > 0] = x[y > 0].sin()
    return out


@program("LEVELS")
def out_argument(m, x, y):
    t = torch.empty(x.shape, dtype=x.dtype)
    with torch.no_grad():
        torch.sin(x, out=t)
    return x * t


@program("LEVELS", "modes")
def inference_mode_inside(m, x, y):
    with torch.inference_mode():
        t = y.sin()
    return x * t.clone() if not torch.is_inference_mode_enabled() else x.cos()


@program("LEVELS", "inner")
def forces(m, x, y):
    with torch.enable_grad():
        t = x if x.requires_grad else x.detach().requires_grad_()
        t2 = torch.autograd.grad(t.sin().pow(2).sum(), t, create_graph=True)[0]
    return t2 * y


@program("LEVELS")
def transposed_detached_in_place(m, x, y):
    t = x.sin()
    t2 = t.detach()
    t2.t_()
    return t * t.exp() * t2.t()


@program("OLD", "functions buffers modules", graphs="matmuls")
def embedding_renormalized(m, x, y):
    return m.renorm(torch.arange(len(x)) % 5) * x


@program("MEMORY", "memory")
def written_through_numpy(m, x, y):
    out = x * 2
    out.detach().numpy()[...] *= 0.5
    return out


@program("MEMORY", "memory")
def map_in_place(m, x, y):
    t = y.detach().clone()
    t.map_(x.detach(), lambda p, q: p * q + 1)
    return x * t


@program("EAGER", "inner")
def backward_of_a_layer_inside(m, x, y):
    with torch.enable_grad():
        t = x.detach().requires_grad_()
        t2 = torch.autograd.grad(m.lin(t).tanh().sum(), t)[0]
    return t2 * y


@program("EAGER", "inner buffers")
def gradient_through_batch_norm(m, x, y):
    with torch.enable_grad():
        t = x if x.requires_grad else x.detach().requires_grad_()
        t2 = torch.autograd.grad(m.bn(t).sin().sum(), t, create_graph=True)[0]
    return t2 * y


@program("EAGER", "hooks")
def hooks_inside(m, x, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        out = (x * y).sin()
    return out


@program("EAGER", "hooks")
def save_on_cpu_inside(m, x, y):
    with torch.autograd.graph.save_on_cpu():
        out = torch.tanh(x @ m.w)
    return out


@program("EAGER")
def memory_given_by_set(m, x, y):
    t = x.sin()
    t2 = torch.empty(0, dtype=x.dtype).set_(t.detach())
    t2.mul_(2)
    return t * t


@program("EAGER")
def transposed_data(m, x, y):
    t = x.sin()
    t2 = t.data
    t2.transpose_(0, 1).mul_(0.5)
    return t * t


@program("EAGER", found="backward/peak")
def sparse_values_shared(m, x, y):
    t = y.detach().sum(0)
    t2 = torch.sparse_coo_tensor(torch.arange(4).repeat(2, 1), t, (4, 4))
    t.mul_(2)
    return torch.sparse.mm(t2, x.t()).t().contiguous()


@program("INNER", "inner functions")
def tiles_that_accumulate(m, x, y):
    return torch.cat([Accumulates.apply(lambda t: (t @ m.w).sin(), part) for part in x.chunk(2)])


@program("INNER", "inner functions")
def reversible_pair(m, x, y):
    first, second = Reversible.apply(m.mlp, torch.tanh, x, y.sin())
    return first * second.cos()
