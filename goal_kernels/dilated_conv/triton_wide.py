"""Launches of the descriptor kernels (`triton_wide_kernels`), and when they are the right ones."""

# The type checker knows neither Triton's launch syntax nor its values at compile time.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from goal_kernels import _launch
from goal_kernels._launch import INTERPRETING, multiprocessors
from goal_kernels.dilated_conv import configurations as table
from goal_kernels.dilated_conv.triton_wide_kernels import wide_kernel, wide_weight_gradient_kernel


def fits(source: Tensor, first: Tensor, second: Tensor, length: int) -> bool:
    """Whether the descriptor kernels take these tensors: width, format, device, 16-byte alignment, little waste."""
    tile = table.wide_tile(interpreted=INTERPRETING)
    return (
        source.shape[-1] in table.WIDE_CHANNELS
        and source.dtype in (torch.float16, torch.bfloat16)
        and first.dtype == second.dtype == source.dtype
        and all(tensor.data_ptr() % 16 == 0 for tensor in (source, first, second))
        and all(tensor.stride(-2) % 8 == 0 for tensor in (source, first))
        and -(-length // tile.rows) * tile.rows <= table.WIDE_WASTE * length
        and (INTERPRETING or on_hopper(source))
    )


def on_hopper(tensor: Tensor) -> bool:
    """Whether launches go to a Hopper GPU (compute capability 9.0)."""
    return not INTERPRETING and _launch.capability(tensor.device) == 90


def convolve(
    source: Tensor,
    weight: Tensor,
    out: Tensor,
    length: int,
    dilation: int,
    *,
    reverse: bool = False,
    norm: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
    eps: float = 0.0,
) -> None:
    """out = source + taps(source); with `norm` (bias, norm weight, norm bias, rstd to fill or None) the whole block."""
    tile = table.wide_tile(interpreted=INTERPRETING)
    taps, channels, _ = weight.shape
    tiles_per_sequence = -(-length // tile.rows)
    tiles = source.shape[0] // length * tiles_per_sequence
    bias, norm_weight, norm_bias, rstd = norm or (None,) * 4
    block = [channels, tile.depth] if reverse else [tile.depth, channels]
    wide_kernel[(min(tiles, multiprocessors(source.device)),)](
        _sequences(source, length, tile.rows, tile.depth),
        _sequences(source, length, tile.rows, channels // 2),
        TensorDescriptor.from_tensor(weight.view(taps * channels, channels), block),
        _sequences(out.view(-1, channels), length, tile.rows, channels // 2),
        bias,
        norm_weight,
        norm_bias,
        rstd,
        tiles,
        tiles_per_sequence,
        length,
        dilation,
        eps,
        CHANNELS=channels,
        TAPS=taps,
        REVERSE=reverse,
        NORM=norm is not None,
        KEEP=rstd is not None,
        BLOCK_ROWS=tile.rows,
        BLOCK_IN=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def weight_gradient(
    x: Tensor,
    hidden: Tensor,
    grad: Tensor,
    out: Tensor,
    length: int,
    dilations: Sequence[int],
    first_layer: int,
) -> list[Tensor]:
    """Partial sums of the gradient of the taps of the layers in `out` (layers, K, D, D), for each group of layers.

    Layer 0 has its rows in `x` and the others in `hidden`: two groups, so that each is one tensor to describe.
    """
    channels = x.shape[-1]
    slabs = hidden.view(-1, x.shape[0], channels)
    grads = grad.view(-1, *grad.shape[-2:])
    last = first_layer + out.shape[0]
    partials = []
    if first_layer == 0:
        partials.append(_weight_partials(x, grads[0], out[:1], length, dilations, 0))
    if last > max(first_layer, 1):
        start = max(first_layer, 1)
        rows = slabs[start - 1 : last - 1].view(-1, channels)
        upstream = grads[start - first_layer :].reshape(-1, channels)
        partials.append(_weight_partials(rows, upstream, out[start - first_layer :], length, dilations, start))
    return partials


def _weight_partials(
    source: Tensor, grad: Tensor, out: Tensor, length: int, dilations: Sequence[int], first_layer: int
) -> Tensor:
    layers, taps, channels, _ = out.shape
    tile = table.wide_weight_tile(interpreted=INTERPRETING)
    jobs = layers * taps * (channels // tile.rows)
    batch = source.shape[0] // length // layers
    steps_per_sequence = -(-length // tile.depth)
    total = batch * steps_per_sequence
    splits = min(max(1, table.WIDE_WEIGHT_PROGRAMS // jobs), total)
    steps = -(-total // splits)
    partials = source.new_empty(splits, *out.shape, dtype=torch.float32)
    wide_weight_gradient_kernel[(jobs * splits,)](
        _sequences(source, length, tile.depth, tile.rows),
        _sequences(grad, length, tile.depth, channels),
        partials,
        batch,
        steps,
        steps_per_sequence,
        total,
        splits,
        first_layer,
        DILATIONS=tuple(dilations),
        CHANNELS=channels,
        TAPS=taps,
        BLOCK_IN=tile.rows,
        BLOCK_ROWS=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return partials


def _sequences(rows: Tensor, length: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe (B * L, D) rows as (B, L, D): what lies before or after a sequence reads as zero."""
    stride = rows.stride(0)
    shape = [rows.shape[0] // length, length, rows.shape[1]]
    return TensorDescriptor(rows, shape, [length * stride, stride, 1], [1, block_rows, block_columns])
