"""Programs as parts of models that people train."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from remat import checkpoint_name
from tests.bank.program import program


@program("", "modules names")
def transformer_mlp(m, x, y):
    h = checkpoint_name(F.gelu(F.layer_norm(x, (4,)) @ m.named["up"]), "h")
    return x + h @ m.named["down"]


@program("", "modules")
def encoder_layer(m, x, y):
    return m.encoder(x[None])[0] * y


@program("", "modules")
def attention_by_hand(m, x, y):
    scores = torch.einsum("td,sd->ts", x @ m.w, y) / 2
    return scores.softmax(-1) @ y


@program("", "modules")
def rotary_embedding(m, x, y):
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    a, b = (x @ m.w).chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@program("", "modules decisions")
def mixture_of_experts(m, x, y):
    gates, chosen = (x @ m.w)[:, :3].softmax(-1).topk(2, -1)
    outs = torch.stack([expert(x).tanh() for expert in m.experts], 1)
    return (outs.gather(1, chosen[..., None].expand(-1, -1, 4)) * gates[..., None]).sum(1)


@program("", "modules decisions sizes")
def routed_by_a_mask(m, x, y):
    out = torch.zeros_like(x)
    best = (x @ m.w)[:, :3].argmax(-1)
    for number, expert in enumerate(m.experts):
        rows = (best == number).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(x[rows]).sin())
    return out


@program("", "modules")
def gated_linear_unit(m, x, y):
    return F.silu(x @ m.named["up"][:, :4]) * (y @ m.w)


@program("", "modules")
def frozen_layer_between(m, x, y):
    return m.lin(m.frozen(m.lin(x).tanh()).sin())


@program("", "modules")
def lora_beside_a_frozen_layer(m, x, y):
    return m.frozen(x) + (x @ m.named["up"]) @ m.named["down"] * 0.5


@program("", "modules")
def lstm(m, x, y):
    return m.lstm(x[None])[0][0] * y


@program("", "modules")
def embedding_bag_of_words(m, x, y):
    tokens = torch.tensor([[0, 2], [1, 4], [3, 3]])[: len(x)]
    return m.embedding(tokens).mean(1) * x


@program("", "modules")
def cross_entropy_head(m, x, y):
    loss = F.cross_entropy(x @ m.table.t(), torch.arange(len(x)) % 5, reduction="none")
    return loss[:, None] * y


@program("", "modules buffers")
def delayed_scaling(m, x, y):
    old = m.steps.clone()
    m.steps.copy_(x.detach().abs().max() + 3)
    return torch.tanh((x * (old + 1)) @ m.w)


@program("", "modules buffers")
def queue_of_features(m, x, y):
    scores = x @ m.queue[:4].clone().t()
    with torch.no_grad():
        m.queue[: len(x)].copy_(x.detach())
    return scores.softmax(-1)


@program("", "modules buffers")
def moving_average_replaced(m, x, y):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return (x - m.mean).tanh()


@program("", "modules")
def state_space_recurrence(m, x, y):
    h, rows = torch.zeros_like(x[0]), []
    for row in x:
        h = 0.5 * h + row @ m.w
        rows.append(h.sin())
    return torch.stack(rows)


@program("", "modules inner")
def energy_and_forces(m, x, y):
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        energy = m.mlp(leaf).sum()
        (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
    return force.tanh() + y


@program("", "modules inner torch.func")
def implicit_step(m, x, y):
    z = x
    for _ in range(2):
        z = z - 0.1 * torch.func.grad(lambda z: (torch.tanh(z @ m.w) - y).square().sum())(z)
    return z


@program("", "modules draws")
def stochastic_depth(m, x, y):
    keep = torch.bernoulli(torch.full((len(x), 1), 0.5, dtype=x.dtype))
    return x + m.lin(x).tanh() * keep


@program("", "modules draws")
def reparameterized(m, x, y):
    mean, spread = (x @ m.w).chunk(2, -1)
    z = mean + spread.exp() * torch.randn_like(spread)
    return torch.cat([z.sin(), z], -1)


@program("", "modules modes")
def autocast_block(m, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        h = F.gelu(x.float() @ m.named["up"].float()) @ m.named["down"].float()
    return x + h.to(x.dtype)


@program("", "modules numbers")
def early_exit(m, x, y):
    h = m.lin(x).tanh()
    return h if float(h.detach().abs().mean()) > 10 else m.lin(h).sin()


@program("", "modules")
def complex_rotation(m, x, y):
    z = torch.view_as_complex(x.reshape(len(x), 2, 2).contiguous())
    return torch.view_as_real(z * torch.exp(1j * y[:, :2])).flatten(1).tanh()


@program("", "modules")
def linear_algebra(m, x, y):
    gram = m.w @ m.w.t() + 4 * torch.eye(4, dtype=x.dtype)
    return torch.linalg.solve(gram, x.t()).t().tanh() + torch.logdet(gram)


@program("", "modules")
def eigenvectors(m, x, y):
    values, vectors = torch.linalg.eigh(m.w + m.w.t() + torch.diag(torch.arange(4.0)))
    return (x @ vectors).square() * values
