"""Programs as parts of models that people train."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from remat import checkpoint_name
from tests.bank.program import expressions, program

expressions(
    "",
    "modules",
    encoder_layer="m.encoder(x[None])[0] * y",
    lora_beside_a_frozen_layer="m.frozen(x) + (x @ m.named['up']) @ m.named['down'] * 0.5",
    lstm="m.lstm(x[None])[0][0] * y",
)


@program("", "modules names")
def transformer_mlp(m, x, y):
    h = checkpoint_name(F.gelu(F.layer_norm(x, (4,)) @ m.named["up"]), "h")
    return x + h @ m.named["down"]


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
def cross_entropy_head(m, x, y):
    loss = F.cross_entropy(x @ m.table.t(), torch.arange(len(x)) % 5, reduction="none")
    return loss[:, None] * y


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
def linear_algebra(m, x, y):
    gram = m.w @ m.w.t() + 4 * torch.eye(4, dtype=x.dtype)
    return torch.linalg.solve(gram, x.t()).t().tanh() + torch.logdet(gram)


@program("", "modules")
def eigenvectors(m, x, y):
    values, vectors = torch.linalg.eigh(m.w + m.w.t() + torch.diag(torch.arange(4.0)))
    return (x @ vectors).square() * values
