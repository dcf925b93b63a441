"""Which ops are matrix products, convolutions, attention or collectives, by qualified name.

Ops are matched by the name of their schema. So an op that this torch lacks, that only a CUDA build has, or
that a library registers later needs no import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from remat._core import forget_when_priced, set_price
from remat.transforms import BoundedCache, RematError
from remat.transforms.compat import HigherOrderOperator, OpOverload, OpOverloadPacket
from remat.transforms.region import forget_all

# What `torch.library.custom_op` returns; public in torch.library's namespace though not in its __all__.
CustomOp: Any = torch.library.CustomOpDef  # type: ignore[reportPrivateImportUsage]

Kind = Literal["matmul", "bmm", "convolution", "attention", "collective"]
KINDS: tuple[Kind, ...] = ("matmul", "bmm", "convolution", "attention", "collective")

# Products of matrices and vectors in which no dimension is shared by both operands and the result, and
# recurrent layers, whose kernels are made of such products.
_MATMUL = """
    mm addmm addmm_ mv addmv addmv_ dot vdot linear linear_backward addbmm addbmm_
    _addmm_activation _foreach_mm inner outer ger tensordot chain_matmul linalg_multi_dot bilinear _trilinear
    _scaled_mm _scaled_mm_v2 _scaled_addmm _scaled_addmm_ _grouped_mm _scaled_grouped_mm
    _scaled_grouped_mm_v2 _int_mm
    _mixed_dtypes_linear _weight_int4pack_mm _weight_int4pack_mm_for_cpu
    _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _dyn_quant_matmul_4bit
    fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
    fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation _wrapped_quantized_linear_prepacked
    mkldnn_linear mkldnn_linear_backward mkldnn_linear_backward_input mkldnn_linear_backward_weights
    _sparse_mm _sparse_addmm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_sparse_matmul
    sparse_sampled_addmm hspmm smm sspaddmm _cslt_sparse_mm
    _sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear
    _cudnn_rnn _cudnn_rnn_backward miopen_rnn miopen_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
    _lstm_mps lstm_mps_backward
    mkl::_mkl_linear mkldnn::_linear_pointwise inductor::_mm_plus_mm inductor::quack_symmetric_mm
    onednn::qlinear_pointwise
    onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16
    symm_mem::fused_all_gather_matmul symm_mem::fused_all_gather_scaled_matmul
    symm_mem::fused_matmul_reduce_scatter symm_mem::fused_scaled_matmul_reduce_scatter
    symm_mem::_async_input_mm
"""

# Products with a dimension that both operands and the result share, and those whose rank decides it.
_BMM = "bmm baddbmm baddbmm_ matmul matmul_backward linalg_matmul linalg_vecdot einsum"

_CONVOLUTION = """
    convolution _convolution _convolution_mode convolution_overrideable convolution_backward
    convolution_backward_overrideable _convolution_double_backward
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc conv_tbc_backward
    conv_depthwise3d _conv_depthwise2d thnn_conv2d _slow_conv2d_forward _slow_conv2d_backward slow_conv3d
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
    cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_transpose miopen_convolution_relu miopen_convolution_add_relu
    miopen_depthwise_convolution mkldnn_convolution _nnpack_spatial_convolution
    _mps_convolution _mps_convolution_transpose mps_convolution_backward mps_convolution_transpose_backward
    mkldnn::_convolution_pointwise mkldnn::_convolution_pointwise_ mkldnn::_convolution_transpose_pointwise
    mkldnn_prepacked::conv2d_run onednn::qconv_pointwise onednn::qconv1d_pointwise
    onednn::qconv2d_pointwise onednn::qconv3d_pointwise
"""

# The last three lines are higher-order operators and libraries that register their kernels as custom ops.
_ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
    _flash_attention_forward _flash_attention_backward _flash_attention_forward_no_dropout_inplace
    _efficient_attention_forward _efficient_attention_backward
    _cudnn_attention_forward _cudnn_attention_forward_no_dropout_inplace _cudnn_attention_backward
    _native_multi_head_attention _triton_multi_head_attention _triton_scaled_dot_attention
    torch_attn::_varlen_attn torch_attn::_varlen_attn_backward
    higher_order::flex_attention higher_order::flex_attention_backward
    flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd
    flash_attn::_flash_attn_backward flash_attn::_flash_attn_varlen_backward flash_attn_3::bwd
    xformers_flash::flash_fwd xformers_flash::flash_bwd xformers::efficient_attention_forward_cutlass
"""

# Collectives whose results are no larger than their operands. All-gathers are not among them: what they make
# is larger than the shard that it can be made of again.
_COLLECTIVE = """
    _c10d_functional::reduce_scatter_tensor _c10d_functional::reduce_scatter_tensor_coalesced
    _c10d_functional::all_to_all_single _c10d_functional::all_reduce _c10d_functional::all_reduce_coalesced
    _dtensor::shard_dim_alltoall
"""


def _qualified(names: str, kind: Kind) -> dict[str, Kind]:
    return {name if "::" in name else f"aten::{name}": kind for name in names.split()}


_COSTLY: dict[str, Kind] = {
    **_qualified(_MATMUL, "matmul"),
    **_qualified(_BMM, "bmm"),
    **_qualified(_CONVOLUTION, "convolution"),
    **_qualified(_ATTENTION, "attention"),
    **_qualified(_COLLECTIVE, "collective"),
}
# A rule may ask for FLOPs.
forget_when_priced(forget_all)
# Looking an op up is on the path of every op of every region: one dict probe, keyed by the op itself.
_KIND_OF: BoundedCache[Any, Kind | None] = BoundedCache(8192)


def qualified_name(op: Any) -> str:
    """`aten::mm` for every overload of `aten.mm`; `higher_order::flex_attention` for that operator."""
    if isinstance(op, OpOverload):
        return op._schema.name
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, HigherOrderOperator):
        return f"higher_order::{op.name()}"
    raise RematError(
        f"Expected an op such as torch.ops.aten.mm.default, got {op!r} of type {type(op).__name__}. Policies "
        f"select the ops below torch's functions: write torch.ops.aten.mm for torch.mm, and so on."
    )


def kind_of(op: Any) -> Kind | None:
    """The class of a costly op, or None for one that is cheap or unknown."""
    try:
        return _KIND_OF[op]
    except KeyError:
        kind = _KIND_OF[op] = _COSTLY.get(qualified_name(op))
        return kind


def register_op(op: Any, *, kind: Kind | None = None, flops: Callable[..., float] | None = None) -> None:
    """Tell policies and the planner of an op of your own: what it is, and what it costs.

    Args:
        op: a `torch.ops` overload, a packet (all its overloads), a higher-order operator, a
            `torch.library.custom_op`, or a qualified name such as `"mylib::gemm"`, registered or not.
        kind: `"matmul"` (`save_matmuls` and `save_weight_matmuls` save it), `"bmm"` or `"convolution"`
            (`save_matmuls` alone), `"attention"` (`save_attention`), `"collective"` (`save_collectives`).
        flops: called with the op's arguments, each tensor replaced by its shape (a tuple of ints); returns
            the FLOPs of one call. Plans that were made before are made again.

    Raises:
        RematError: `op` is not an op, `kind` is not one of the five, `flops` is not a function, or neither is
            given.

    Example:
        >>> from remat import register_op
        >>> register_op("mylib::fused_mlp", kind="matmul", flops=lambda x, w: 2 * x[0] * x[1] * w[1])
    """
    if kind is not None and kind not in KINDS:
        raise RematError(f"Unknown kind {kind!r} of a costly op: write one of {', '.join(map(repr, KINDS))}.")
    if flops is not None and not callable(flops):
        raise RematError(
            f"register_op: got flops={flops!r}; expected a function of the op's arguments, tensors as "
            f"their shapes, such as lambda x, w: 2 * x[0] * x[1] * w[1]."
        )
    if isinstance(op, CustomOp):
        op = op._qualname
    name = op if isinstance(op, str) else qualified_name(op)
    if "::" not in name:
        raise RematError(f"The op name {name!r} has no namespace: write 'namespace::name', as in 'aten::mm'.")
    if kind is None and flops is None:
        raise RematError(
            f"register_op({name!r}): say what it is (kind='matmul'), what it costs (flops=), or both."
        )
    if flops is not None:
        set_price(name, flops)
    if kind is not None:
        _COSTLY[name] = kind
        _KIND_OF.clear()
        forget_all()


def register_costly_op(op: Any, kind: Kind = "matmul") -> None:
    """Deprecated: `register_op(op, kind=...)`."""
    register_op(op, kind=kind)


def register_cost(op: Any, flops: Callable[..., float]) -> None:
    """Deprecated: `register_op(op, flops=...)`."""
    register_op(op, flops=flops)
