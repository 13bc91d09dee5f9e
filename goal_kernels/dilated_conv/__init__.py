"""Dilated causal convolutions over (batch, position, channel), alone and fused with residual and LayerNorm.

Legend of the shapes: B sequences, L positions, D channels, K taps, J layers. Every op takes fp32, fp16, bf16 and fp64,
any strides, zero-size inputs and windows shorter than the receptive field, works under `torch.compile(fullgraph=True)`,
CUDA graph capture and autocast (x and the taps take autocast's dtype; biases and norm parameters keep theirs), and
gives the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from goal_kernels._checks import (
    check_integer,
    check_number,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
)
from goal_kernels._precision import autocast
from goal_kernels.backend import backend_for, fall_back
from goal_kernels.dilated_conv import eager

__all__ = ["causal_conv_block", "causal_conv_stack", "dilated_causal_conv"]


def dilated_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dilation: int) -> Tensor:
    """Causal convolution over positions: `out[b, t] = bias + sum_i x[b, t - dilation * i] @ weight[i]`.

    Positions before 0 count as zero, so tap 0 sees the present and no tap sees the future.

    Args:
        x: `(B, L, Din)`.
        weight: `(K, Din, Dout)`, the dtype of `x`.
        bias: `(Dout)`, any floating dtype, or None.
        dilation: distance between taps in positions, at least 1.

    Returns:
        `(B, L, Dout)` in the dtype of `x`, accumulated in fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError: an argument is not a floating tensor, or `weight` differs from `x` in dtype.
        ValueError: shapes or devices do not fit together, or `dilation` is below 1.

    Example:
        >>> x = torch.arange(4.0).view(1, 4, 1)
        >>> dilated_causal_conv(x, torch.ones(2, 1, 1), dilation=2).flatten()
        tensor([0., 1., 2., 4.])
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    x, weight = autocast(x, weight)
    check_shape("x", x, (None, None, None), "(B, L, Din)")
    check_shape("weight", weight, (None, x.shape[2], None), "(K, Din, Dout)")
    check_integer("K, the number of taps of weight", weight.shape[0], minimum=1)
    if bias is not None:
        check_tensor("bias", bias)
        check_shape("bias", bias, (weight.shape[2],), "(Dout,)")
    check_same_dtype("x", x, weight=weight)
    check_same_device("x", x, weight=weight, bias=bias)
    check_integer("dilation", dilation, minimum=1)
    if _use_triton(x):
        from goal_kernels.dilated_conv import triton as kernels

        return kernels.dilated_causal_conv(x, weight, bias, dilation)
    return eager.dilated_causal_conv(x, weight, bias, dilation)


def causal_conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    dilation: int,
    eps: float = 1e-5,
) -> Tensor:
    """One layer of the encoder: `LayerNorm(x + dilated_causal_conv(x))`, in one pass on a GPU.

    Args:
        x: `(B, L, D)`.
        weight: `(K, D, D)`, the dtype of `x`.
        bias, norm_weight, norm_bias: `(D)`, any floating dtype.
        dilation: distance between taps in positions, at least 1.
        eps: added to the variance in LayerNorm, above 0.

    Returns:
        `(B, L, D)` in the dtype of `x`.

    Raises:
        TypeError: an argument is not a floating tensor, or `weight` differs from `x` in dtype.
        ValueError: shapes or devices do not fit together, or `dilation` or `eps` is out of range.
    """
    x, weight = _check_layers(x, weight, bias, norm_weight, norm_bias, layers=None, suffix="")
    check_integer("dilation", dilation, minimum=1)
    check_number("eps", eps, minimum=0.0, exclusive=True)
    if _use_triton(x):
        from goal_kernels.dilated_conv import triton as kernels

        return kernels.causal_conv_block(x, weight, bias, norm_weight, norm_bias, dilation, eps)
    return eager.causal_conv_block(x, weight, bias, norm_weight, norm_bias, dilation, eps)


def causal_conv_stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float = 1e-5,
) -> Tensor:
    """J blocks in a row (`causal_conv_block`), one call: layer j has dilation `dilations[j]`.

    On a GPU short sequences run all layers in one launch and long ones one launch per layer, whichever is faster for
    the shape.

    Args:
        x: `(B, L, D)`.
        weights: `(J, K, D, D)`, the dtype of `x`.
        biases, norm_weights, norm_biases: `(J, D)`, any floating dtype.
        dilations: J distances between taps in positions, each at least 1.
        eps: added to the variance in every LayerNorm, above 0.

    Returns:
        `(B, L, D)` in the dtype of `x`; `x` itself where J is 0.

    Raises:
        TypeError: an argument is not a floating tensor, or `weights` differs from `x` in dtype.
        ValueError: shapes or devices do not fit together, or a dilation or `eps` is out of range.
    """
    dilations = tuple(dilations)
    x, weights = _check_layers(x, weights, biases, norm_weights, norm_biases, layers=len(dilations), suffix="s")
    for layer, dilation in enumerate(dilations):
        check_integer(f"dilations[{layer}]", dilation, minimum=1)
    check_number("eps", eps, minimum=0.0, exclusive=True)
    if not dilations:
        return x
    if _use_triton(x):
        from goal_kernels.dilated_conv import triton as kernels

        return kernels.causal_conv_stack(x, weights, biases, norm_weights, norm_biases, dilations, eps)
    return eager.causal_conv_stack(x, weights, biases, norm_weights, norm_biases, dilations, eps)


def _use_triton(x: Tensor) -> bool:
    if backend_for(x) != "triton":
        return False
    if x.dtype == torch.float64:
        # The kernels accumulate in fp32.
        fall_back("dilated convolution", "16- and 32-bit floats")
        return False
    return True


def _check_layers(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    layers: int | None,
    suffix: str,
) -> tuple[Tensor, Tensor]:
    """Check one block's tensors (`layers` None) or a stack's; x and the taps as autocast wants them."""
    plural = "es" if suffix else ""
    vectors = {"bias" + plural: bias, "norm_weight" + suffix: norm_weight, "norm_bias" + plural: norm_bias}
    check_tensor("x", x)
    check_tensor("weight" + suffix, weight)
    x, weight = autocast(x, weight)
    check_shape("x", x, (None, None, None), "(B, L, D)")
    channels = x.shape[2]
    leading, axes = ((), "") if layers is None else ((layers,), "J, ")
    check_shape("weight" + suffix, weight, (*leading, None, channels, channels), f"({axes}K, D, D)")
    check_integer(f"K, the number of taps of weight{suffix}", weight.shape[-3], minimum=1)
    for argument, vector in vectors.items():
        check_tensor(argument, vector)
        check_shape(argument, vector, (*leading, channels), f"({axes}D)")
    check_same_dtype("x", x, **{"weight" + suffix: weight})
    check_same_device("x", x, **{"weight" + suffix: weight}, **vectors)
    return x, weight
