"""Programs that write into memory, most of it their own."""

from __future__ import annotations

import torch

from tests.bank.program import expressions, program

expressions(
    "OPEN",
    "memory torch.func",
    functional_jvp_inside="torch.autograd.functional.jvp(lambda t: t.sin(), x.detach(), y.detach())[1] * x",
)
expressions(
    "WRITES",
    "writes",
    scaled_in_place="x.sin().mul_(2).add_(y)",
    relu_in_place="(x * 2).relu_()",
    zeros_copied_into="torch.zeros_like(x).copy_(x).sin()",
    masked_fill="x.clone().masked_fill_(y > 0, 0.5)",
    clamped="(x + 1).clamp_(-1, 2).sin()",
    scattered="x.clone().scatter_add_(1, torch.zeros(len(x), 4, dtype=torch.long), y)",
    squeezed_in_place="x.clone().squeeze_().unsqueeze_(0).squeeze_(0)",
    lerp_and_addcmul="x.clone().lerp_(y, 0.25).addcmul_(x, y)",
)


@program("WRITES", "writes")
def row_from_another(m, x, y):
    out = x.clone()
    out[0] = out[1] * 2
    return out


@program("WRITES", "writes")
def empty_filled_by_halves(m, x, y):
    out = torch.empty_like(x)
    out[:, :2] = x[:, 2:]
    out[:, 2:] = y[:, :2].sin()
    return out


@program("WRITES", "writes")
def every_second_doubled(m, x, y):
    out = x.cos() * 2
    t = out.view(-1)[::2]
    t.mul_(2)
    return out


@program("WRITES", "writes")
def row_of_transpose(m, x, y):
    out = x.cos()
    out.t()[1].mul_(y[:, 0])
    return out


@program("WRITES", "writes")
def narrow_added_to(m, x, y):
    out = x + 0
    out.narrow(1, 1, 2).add_(y[:, :2])
    return out


@program("WRITES", "writes")
def columns_filled_in_a_loop(m, x, y):
    out = torch.zeros_like(x)
    for t in range(3):
        out[:, t] = (x[:, t] * (t + 1)).sin()
    return out


@program("WRITES", "writes")
def view_before_a_write(m, x, y):
    t = x * 2
    t2 = t[:, 1:]
    t.add_(y)
    return t2.sum(1, keepdim=True) * t


@program("WRITES", "writes")
def complex_view_written(m, x, y):
    t = torch.view_as_complex(x.clone().view(-1, 2, 2))
    t.mul_(1j)
    return torch.view_as_real(t).reshape(x.shape)


@program("WRITES", "writes")
def index_put_accumulates(m, x, y):
    out = x.sin()
    out.index_put_((torch.tensor([0, 0]), torch.tensor([1, 2])), y[0, :2], accumulate=True)
    return out


@program("WRITES", "writes")
def written_through_detach(m, x, y):
    t = x + 1
    t.detach().mul_(2)
    return t.sin()


@program("WRITES", "writes")
def list_of_one_memory(m, x, y):
    t = [x.sin()]
    t.append(t[0].mul_(y))
    return t[0] + t[1]


@program("REFUSED", "writes argument")
def argument_written(m, x, y):
    x.mul_(2)
    return x.sin()


@program("OPEN", "memory")
def data_scaled(m, x, y):
    t = x + 1
    t.data.mul_(2)
    return t.sin()


@program("OPEN", "memory")
def data_replaced(m, x, y):
    t = x * 2
    t.data = t.data.sin()
    return t * y
