"""Programs that write into memory, most of it their own."""

from __future__ import annotations

import torch

from tests.bank.program import program


@program("WRITES", "writes")
def scaled_in_place(m, x, y):
    return x.sin().mul_(2).add_(y)


@program("WRITES", "writes")
def relu_in_place(m, x, y):
    return (x * 2).relu_()


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
def zeros_copied_into(m, x, y):
    return torch.zeros_like(x).copy_(x).sin()


@program("WRITES", "writes")
def masked_fill(m, x, y):
    return x.clone().masked_fill_(y > 0, 0.5)


@program("WRITES", "writes")
def clamped(m, x, y):
    return (x + 1).clamp_(-1, 2).sin()


@program("WRITES", "writes")
def column_zeroed(m, x, y):
    out = x.sin()
    out.select(1, 0).zero_()
    return out


@program("WRITES", "writes")
def narrow_added_to(m, x, y):
    out = x + 0
    out.narrow(1, 1, 2).add_(y[:, :2])
    return out


@program("WRITES", "writes")
def indices_copied(m, x, y):
    return x.clone().index_copy_(1, torch.tensor([0, 2]), y[:, :2].sin())


@program("WRITES", "writes")
def scattered(m, x, y):
    return x.clone().scatter_add_(1, torch.zeros(len(x), 4, dtype=torch.long), y)


@program("WRITES", "writes")
def columns_filled_in_a_loop(m, x, y):
    out = torch.zeros_like(x)
    for t in range(3):
        out[:, t] = (x[:, t] * (t + 1)).sin()
    return out


@program("WRITES", "writes")
def augmented_assignments(m, x, y):
    out = x.sin()
    out += y
    out *= 0.5
    return out


@program("WRITES", "writes")
def squeezed_in_place(m, x, y):
    return x.clone().squeeze_().unsqueeze_(0).squeeze_(0)


@program("WRITES", "writes")
def lerp_and_addcmul(m, x, y):
    return x.clone().lerp_(y, 0.25).addcmul_(x, y)


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
def diagonal_added_to(m, x, y):
    out = x.clone()
    out.diagonal().add_(1.5)
    return out


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


@program("OPEN", "memory torch.func")
def functional_jvp_inside(m, x, y):
    return torch.autograd.functional.jvp(lambda t: t.sin(), x.detach(), y.detach())[1] * x
