"""Programs with memory that is filled, or looked at, past torch, and tensors that share it as no op tells."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from tests.bank.library import R
from tests.bank.program import program

D = torch.float64


@program("", "raw memory draws")
def filled_by_numpy_part_by_part(m, x, y):
    made = torch.zeros(2, 4, dtype=D)
    there = made.numpy()
    there[:1] = np.random.normal(size=(1, 4))
    first = made.exp()
    there[1:] = np.random.normal(size=(1, 4))
    made[0].mul_(2)
    second = made * first
    there[0] = 0.5
    return x * (second + made).sum(0)


@program("", "raw memory draws")
def filled_by_ctypes(m, x, y):
    numbers, made = np.random.normal(size=12), torch.empty(3, 4, dtype=D)
    ctypes.memmove(made.data_ptr(), numbers.ctypes.data, numbers.nbytes)
    return (x @ m.w * made.mul_(0.5).t().contiguous().t().sum(0)).exp().tanh()


@program("", "raw memory draws")
def one_scratch_filled_again(m, x, y):
    scratch, total = torch.empty(4, dtype=D), torch.zeros(4, dtype=D)
    there = scratch.numpy()
    for _ in range(3):
        there[...] = np.random.normal(size=4)
        total = total + scratch.sin()
    return (x * total).exp().tanh()


@program("", "raw memory draws")
def written_over_a_value(m, x, y):
    made = x.detach().exp()
    made.numpy()[...] *= np.random.normal(size=made.shape)
    return x.sin() * made


@program("", "raw memory draws stores captures")
def sampler_beside_a_cached_root(m, x, y):
    if "root" not in m.cache:
        m.cache["root"] = (m.w @ m.w.t()).exp().tanh().detach()
    made = torch.empty(4, dtype=D)
    made.numpy()[...] = np.random.normal(size=4)
    return ((x.sin() @ m.cache["root"] * made).exp() @ m.w).tanh()


@program("", "raw memory draws nests")
def sampler_beside_a_region_inside(m, x, y):
    inner = R(lambda x: (x @ m.w * torch.from_numpy(np.random.normal(size=4))).exp().tanh(), "matmuls")
    return inner(x.cos()).sin() * torch.from_numpy(np.random.normal(size=4))


@program("", "raw memory draws inner")
def energy_of_filled_memory(m, x, y):
    made = torch.from_numpy(np.random.normal(size=4))
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        energy = (leaf.sin() * made).exp().sum()
        force = torch.autograd.grad(energy, leaf, create_graph=True)[0]
    return energy * force.tanh() * y


@program("", "raw memory")
def number_of_numpy_scales(m, x, y):
    h = x.sin()
    scale = float(np.abs(h.detach().numpy()).max())
    return (h / scale).exp() * torch.from_numpy(h.detach().numpy() + 1)


@program("", "raw memory buffers")
def buffer_written_by_numpy(m, x, y):
    h = (x @ x.t()).sum(1, keepdim=True).sin() * m.mean.clone()
    m.mean.numpy()[1:] *= 0.5
    return (h * m.mean.clone()).sin().exp() * y


@program("", "raw memory buffers", found="forward_ad/names")
def buffer_written_by_a_pointer(m, x, y):
    h = x.sin() * m.mean.clone()
    (ctypes.c_double * 4).from_address(m.mean.data_ptr())[0] += 1.5
    return (h * m.mean.clone()).sin() * y


@program("", "raw memory buffers")
def buffer_written_by_dlpack(m, x, y):
    h = x.sin() * m.mean.clone()
    dlpack.from_dlpack(m.mean.detach()).add_(1)
    return (h * m.mean.clone()).sin() * y


@program("", "raw memory buffers")
def buffer_written_by_python(m, x, y):
    m.mean.apply_(lambda a: a * 0.5 + 1)
    return x * m.mean.clone() * m.mean.clone()


@program("", "raw memory")
def original_transposed(m, x, y):
    h = (x.t() @ x).clone()
    k = h.detach()
    h.transpose_(0, 1)
    return y @ (h * k)


@program("", "raw memory")
def alias_with_other_strides(m, x, y):
    h = (x.t() @ x).sin()
    k = h.data
    k.as_strided_((4, 4), (1, 4))
    return y @ (h * h * k)


@program("", "raw memory writes")
def alias_resized(m, x, y):
    h = (x.t() @ x).sin()
    k = h.detach()
    k.resize_(2, 4).add_(1)
    return y @ torch.cat([h[:2] * k, h[2:]])


@program("", "raw memory writes")
def capsule_of_a_part(m, x, y):
    h = (x.t() @ x).sin()
    capsule: Any = getattr(dlpack, "to_dlpack")(h.detach()[1:])  # noqa: B009
    k = dlpack.from_dlpack(capsule)
    h.detach().mul_(3)
    return y[:, :1] * (h[1:] * h[1:] * k).sum(0)


@program("", "raw memory writes")
def memory_of_an_import_written_after_it_was_read(m, x, y):
    h = (x.t() @ x).sin()
    k = dlpack.from_dlpack(h.detach())
    out = (k + x.sum()).exp()
    h.detach().mul_(3)
    return y @ (out * h * k)


@program("", "raw memory writes")
def nested_rows_written(m, x, y):
    h = (x.t() @ x).sin()
    n = torch.nested.as_nested_tensor([h[:2], h[2:3]])
    n.detach().unbind()[0].mul_(2)
    return y @ torch.cat([n.to_padded_tensor(0.0)[0].sin() * h[:2], h[2:]])


@program("", "raw memory buffers writes")
def buffer_and_its_memory_set_to_another(m, x, y):
    k: Any = torch.empty(0, dtype=m.mean.dtype)
    k.set_(m.mean)
    k.add_(1)
    return x * m.mean.clone() * k.clone()


@program("", "raw memory draws")
def filled_after_it_was_resized(m, x, y):
    made = torch.empty(0, dtype=D)
    there = made.resize_(2, 4).numpy()
    there[...] = np.random.normal(size=(2, 4))
    first = made.sin()
    there[1] = np.random.normal(size=4)
    return x.cos() * (first.sum(0) * made[1].exp()).tanh()
