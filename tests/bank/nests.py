"""Programs with regions, scans and checkpoints inside, and names that policies look for."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_name
from tests.bank.library import TILED, R
from tests.bank.program import expressions, program

expressions(
    "",
    "names nests",
    name_in_a_region_inside="R(lambda x: checkpoint_name(torch.tanh(x @ m.w), 'h').exp(), 'names')(x) * y",
)
expressions(
    "",
    "nests writes",
    result_written_in_place="R(lambda x: torch.tanh(x @ m.w) * 2)(x).mul_(y)",
)
expressions(
    "",
    "nests scans",
    scan_that_keeps_all="SCAN(lambda h: torch.tanh(h @ m.w) + y, x, 3, 'all', 'matmuls')",
    scan_of_regions="SCAN(lambda h: R(lambda h: (h @ m.w).sin())(h) * y, x, 3, 2)",
)
expressions(
    "",
    "names",
    name_of_a_view="checkpoint_name((x @ m.w).t(), 'h').sin().t().exp()",
)
expressions(
    "",
    "nests torch.func",
    vmap_inside_over_a_region="torch.func.vmap(R(lambda row: torch.tanh(m.w @ row)))(x) * y",
)


@program("", "nests")
def region_inside_that_saves(m, x, y):
    inner = R(lambda x, y: torch.tanh(x @ m.w).exp() * y, "matmuls")
    return inner(x, y).sin()


@program("", "nests")
def layers_one_after_another(m, x, y):
    for layer in (m.lin, m.mlp, m.lin):
        x = x + R(layer)(x).tanh()
    return x


@program("", "nests")
def layers_under_other_policies(m, x, y):
    for policy in ("nothing", "matmuls", "everything", "odd"):
        x = R(lambda x: torch.tanh(x @ m.w) + x, policy)(x)
    return x * y


@program("", "nests captures")
def late_bound_layers(m, x, y):
    for layer in m.experts:
        x = R(lambda x: torch.tanh(layer(x)))(x)  # noqa: B023
    return x


@program("", "nests")
def three_deep(m, x, y):
    inner = R(lambda x: x.sin().exp())
    middle = R(lambda x: inner(x @ m.w).tanh(), "matmuls")
    return R(lambda x: middle(x) * inner(y))(x)


@program("", "nests")
def four_deep_alike(m, x, y):
    f = lambda x: (x @ m.w).sin()  # noqa: E731
    for _ in range(4):
        f = (lambda inner: R(lambda x: inner(x).cos()))(f)
    return f(x)


@program("", "nests")
def region_called_twice(m, x, y):
    inner = R(lambda x: torch.tanh(x @ m.w))
    return inner(inner(x)) + inner(y)


@program("", "nests")
def region_whose_result_is_unused(m, x, y):
    _, kept = R(lambda x, y: ((x @ m.w).exp(), x.sin() * y))(x, y)
    return kept


@program("", "nests memory")
def numpy_in_a_region_inside(m, x, y):
    def half(x):
        h = x.sin() @ m.w
        return (h * torch.from_numpy(np.cos(h.detach().numpy()))).exp()

    return R(half, "matmuls")(x.cos() * 2) * y


@program("", "nests memory")
def data_replaced_in_a_region_inside(m, x, y):
    def inner(x):
        made = x * 2
        made.data = made.data.sin()
        return made * x

    return R(inner)(x).cos() * y


@program("", "nests draws")
def dropouts_in_two_regions(m, x, y):
    half = R(lambda x: F.dropout(x.contiguous(), 0.5) * 2)
    return half(x) + half(y)


@program("", "nests stores python")
def region_that_escapes(m, x, y):
    def body(x):
        m.escaped.append(x.sin() * 2)
        return x.cos()

    return R(body)(x) * y


@program("", "nests", found="vmap/matmuls")
def checkpoints_of_torch_around_two_layers(m, x, y):
    for policy in ("matmuls", "nothing"):
        layer = R(lambda x: m.mlp(x).sin(), policy)
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@program("", "nests")
def attention_in_torchs_checkpoint(m, x, y):
    layer = R(lambda x: m.encoder(x[None])[0], "matmuls")
    return checkpoint(layer, x, use_reentrant=False)


@program("", "nests scans", found="backward/half")
def tiles_of_a_region(m, x, y):
    return TILED(R(lambda x, w: m.lin(x).sin() @ w, "matmuls"), x.exp(), w=m.w.cos(), tiles=3) * y


@program("", "names")
def two_names(m, x, y):
    h = checkpoint_name((x @ m.w).sin(), "h")
    return checkpoint_name(h.exp().tanh(), "other") * y


@program("", "names containers")
def name_of_a_tree(m, x, y):
    tree = checkpoint_name({"a": x.sin(), "b": [y.cos(), 3]}, "h")
    return (tree["a"] @ m.w) * tree["b"][0].exp()


@program("", "names writes")
def name_of_what_is_written_later(m, x, y):
    h = checkpoint_name(x * 2, "h")
    g = h + 1
    h.mul_(y)
    return g.exp().tanh() * h


@program("", "nests captures")
def regions_over_a_parameter_dict(m, x, y):
    body = R(lambda p, x: torch.tanh(x @ p["up"]) @ p["down"])
    return body(dict(m.named), x) + y


@program("", "nests inner", found="counted/but_names")
def forces_of_a_region(m, x, y):
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        energy = R(lambda x: torch.tanh(x @ m.w).square())(leaf).sum()
        force = torch.autograd.grad(energy, leaf, create_graph=True)[0]
    return force * y
