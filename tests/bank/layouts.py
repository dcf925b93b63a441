"""Programs of images, and of ops whose results are laid out as their operands are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.bank.program import expressions, program

expressions(
    "",
    "draws",
    gelu_and_dropout="F.dropout(F.gelu(x), 0.3) * x",
    noise_like_a_transpose="(x.t() * torch.rand_like(x.t())).t().sin()",
    feature_dropout="F.alpha_dropout(x.sin(), 0.4) * y",
)
expressions(
    "",
    zeros_like_an_operand="(x + torch.zeros_like(x).add(y)).exp().tanh()",
    strides_asked_for="(x if x.is_contiguous() else x.contiguous() * 1.0).sin() * y",
)

IMAGE = (2, 4, 4)
expressions(
    "",
    "image",
    IMAGE,
    convolution="m.conv(x.sin()).tanh() * y",
    group_norm_of_an_image="m.group(m.conv(x)).sigmoid() * y",
    layer_norm_of_channels="F.layer_norm(x.permute(0, 2, 3, 1), (2,)).permute(0, 3, 1, 2).sin() * y",
    pooled_and_back="F.interpolate(F.avg_pool2d(m.conv(x), 2), scale_factor=2).tanh() * y",
    transposed_convolution="F.conv_transpose2d(x.tanh(), m.conv.weight, padding=1).sin()",
    made_channels_last_inside="m.conv(x.contiguous(memory_format=torch.channels_last)).tanh() * y",
)
expressions(
    "",
    "image buffers",
    IMAGE,
    convolution_and_batch_norm="x + m.bn2(m.conv(x)).relu()",
)
expressions(
    "",
    "image draws",
    IMAGE,
    dropout_of_an_image="m.conv(F.dropout(x.relu(), 0.5)).tanh()",
    noise_like_an_image="m.conv(x) * torch.randn_like(x).sigmoid()",
)


@program("", "image decisions", shape=IMAGE)
def max_pooled_and_unpooled(m, x, y):
    pooled, at = F.max_pool2d(x.sin(), (2, 2), return_indices=True)
    return F.max_unpool2d(pooled.exp(), at, (2, 2)) * y


@program("", "image draws writes", shape=IMAGE)
def mask_drawn_into_empty(m, x, y):
    mask = torch.empty_like(x).uniform_(0, 1) > 0.5
    return (m.conv(x) * mask).exp()


@program("", "image writes", shape=IMAGE)
def image_written_in_place(m, x, y):
    out = m.conv(x).relu_() * 2
    out[:, :, 1:].mul_(2)
    return out


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
