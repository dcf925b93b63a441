"""Programs of images, and of ops whose results are laid out as their operands are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.bank.program import program

IMAGE = (2, 4, 4)


@program("", "image", shape=IMAGE)
def convolution(m, x, y):
    return m.conv(x.sin()).tanh() * y


@program("", "image buffers", shape=IMAGE)
def convolution_and_batch_norm(m, x, y):
    return x + m.bn2(m.conv(x)).relu()


@program("", "image", shape=IMAGE)
def group_norm_of_an_image(m, x, y):
    return m.group(m.conv(x)).sigmoid() * y


@program("", "image", shape=IMAGE)
def layer_norm_of_channels(m, x, y):
    return F.layer_norm(x.permute(0, 2, 3, 1), (2,)).permute(0, 3, 1, 2).sin() * y


@program("", "image", shape=IMAGE)
def pooled_and_back(m, x, y):
    return F.interpolate(F.avg_pool2d(m.conv(x), 2), scale_factor=2).tanh() * y


@program("", "image decisions", shape=IMAGE)
def max_pooled_and_unpooled(m, x, y):
    pooled, at = F.max_pool2d(x.sin(), (2, 2), return_indices=True)
    return F.max_unpool2d(pooled.exp(), at, (2, 2)) * y


@program("", "image draws", shape=IMAGE)
def dropout_of_an_image(m, x, y):
    return m.conv(F.dropout(x.relu(), 0.5)).tanh()


@program("", "image draws", shape=IMAGE)
def channels_dropped(m, x, y):
    return F.dropout2d(m.conv(x).sin(), 0.5) * y


@program("", "image draws", shape=IMAGE)
def noise_like_an_image(m, x, y):
    return m.conv(x) * torch.randn_like(x).sigmoid()


@program("", "image draws writes", shape=IMAGE)
def mask_drawn_into_empty(m, x, y):
    mask = torch.empty_like(x).uniform_(0, 1) > 0.5
    return (m.conv(x) * mask).exp()


@program("", "image writes", shape=IMAGE)
def image_written_in_place(m, x, y):
    out = m.conv(x).relu_() * 2
    out[:, :, 1:].mul_(2)
    return out


@program("", "image", shape=IMAGE)
def depthwise_and_pointwise(m, x, y):
    kernel = torch.ones(2, 1, 3, 3, dtype=x.dtype) / 9
    return F.conv2d(F.conv2d(x.sin(), kernel, padding=1, groups=2), m.conv.weight[:, :, :1, :1]).tanh()


@program("", "image", shape=IMAGE)
def padded_by_reflection(m, x, y):
    return F.pad(x, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1].sin() * y


@program("", "image", shape=IMAGE)
def transposed_convolution(m, x, y):
    return F.conv_transpose2d(x.tanh(), m.conv.weight, padding=1).sin()


@program("", "image", shape=IMAGE)
def windows_folded(m, x, y):
    columns = F.unfold(x, 2, stride=2).sin()
    return F.fold(columns, (4, 4), 2, stride=2) * y


@program("", "image", shape=IMAGE)
def made_channels_last_inside(m, x, y):
    return m.conv(x.contiguous(memory_format=torch.channels_last)).tanh() * y


@program("", "draws")
def gelu_and_dropout(m, x, y):
    return F.dropout(F.gelu(x), 0.3) * x


@program("", "draws")
def noise_like_a_transpose(m, x, y):
    return (x.t() * torch.rand_like(x.t())).t().sin()


@program("", "draws")
def feature_dropout(m, x, y):
    return F.alpha_dropout(x.sin(), 0.4) * y


@program("", "draws")
def native_dropout(m, x, y):
    out, mask = torch.native_dropout(x.sin(), 0.5, True)
    return out * y


@program("", "draws")
def native_dropout_in_evaluation(m, x, y):
    out, mask = torch.native_dropout(x.sin(), 0.5, False)
    return out * 3


@program("", "draws")
def complex_noise(m, x, y):
    noise = torch.randn(4, dtype=torch.complex128)
    return x.sin() * noise.real + y * noise.imag


@program("", "")
def zeros_like_an_operand(m, x, y):
    return (x + torch.zeros_like(x).add(y)).exp().tanh()


@program("", "")
def strides_asked_for(m, x, y):
    return (x if x.is_contiguous() else x.contiguous() * 1.0).sin() * y
