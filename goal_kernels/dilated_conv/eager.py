"""Plain torch implementations: the truth for tests and the CPU path.

fp16 and bf16 are computed in fp32 and rounded once at the end; fp32 stays fp32 and fp64 stays fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from goal_kernels._precision import compute_dtype, without_autocast


def dilated_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """See `goal_kernels.dilated_causal_conv`."""
    dtype = compute_dtype(x.dtype)
    with without_autocast(x.device.type):
        out = _convolve(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), dilation)
    return out.to(x.dtype)


def causal_conv_block(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, dilation: int, eps: float
) -> Tensor:
    """See `goal_kernels.causal_conv_block`."""
    dtype = compute_dtype(x.dtype)
    weight, bias, norm_weight, norm_bias = (tensor.to(dtype) for tensor in (weight, bias, norm_weight, norm_bias))
    with without_autocast(x.device.type):
        out = _block(x.to(dtype), weight, bias, norm_weight, norm_bias, dilation, eps)
    return out.to(x.dtype)


def causal_conv_stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
) -> Tensor:
    """See `goal_kernels.causal_conv_stack`."""
    dtype = compute_dtype(x.dtype)
    parameters = [tensor.to(dtype) for tensor in (weights, biases, norm_weights, norm_biases)]
    with without_autocast(x.device.type):
        out = x.to(dtype)
        # unbind, not indexing: its backward is one stack instead of a zero-filled copy per layer
        for weight, bias, norm_weight, norm_bias, dilation in zip(
            *(tensor.unbind(0) for tensor in parameters), dilations, strict=True
        ):
            out = _block(out, weight, bias, norm_weight, norm_bias, dilation, eps)
    return out.to(x.dtype)


def _block(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, dilation: int, eps: float
) -> Tensor:
    out = x + _convolve(x, weight, bias, dilation)
    return F.layer_norm(out, out.shape[-1:], norm_weight, norm_bias, eps)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """One matmul over the taps laid side by side.

    On CPU this is within 10% of one matmul per tap on large batches and 1.3 times as fast on small ones, and ahead of
    `F.conv1d` on the transposed input; taps that reach past the first position everywhere are left out.
    """
    batch, length, channels = x.shape
    taps = min(weight.shape[0], max(1, -(-length // dilation)))
    shifted = [x]
    for tap in range(1, taps):
        shift = tap * dilation
        shifted.append(F.pad(x[:, : length - shift], (0, 0, shift, 0)))
    columns = torch.cat(shifted, dim=-1).reshape(batch * length, taps * channels)
    matrix = weight[:taps].reshape(taps * channels, weight.shape[2])
    out = columns @ matrix if bias is None else torch.addmm(bias, columns, matrix)
    return out.view(batch, length, weight.shape[2])
