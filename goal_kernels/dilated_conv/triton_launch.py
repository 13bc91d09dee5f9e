"""One function per Triton kernel: its tile from the pinned tables, its grid, its launch.

Rows are (B * L, D) tensors with channels side by side at any row stride (`as_rows`). Launches go to the current device:
the callers make that the tensors'.
"""

# The type checker knows neither Triton's launch syntax nor its values at compile time.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from goal_kernels._launch import INTERPRETING
from goal_kernels.dilated_conv import configurations as table
from goal_kernels.dilated_conv import triton_wide as wide
from goal_kernels.dilated_conv.triton_backward import (
    column_sum_kernel,
    norm_backward_kernel,
    sum_partials_kernel,
    sum_vectors_kernel,
    weight_gradient_kernel,
)
from goal_kernels.dilated_conv.triton_forward import block_kernel, conv_kernel, norm_kernel, stack_kernel

# Tile offsets are 32-bit: 128 rows of this stride stay below 2^31.
LARGEST_ROW_STRIDE = 2**23


def as_rows(tensor: Tensor) -> Tensor:
    """(B, L, D) as (B * L, D) with channels side by side and rows at one stride: a view where possible."""
    batch, length, channels = tensor.shape
    stride = tensor.stride(1)
    flat = batch <= 1 or tensor.stride(0) == length * stride
    if flat and tensor.stride(2) == 1 and channels <= stride <= LARGEST_ROW_STRIDE:
        return tensor.as_strided((batch * length, channels), (stride, 1))
    return tensor.contiguous().view(batch * length, channels)


def _shifts(dilations: Sequence[int], taps: int) -> tuple[int, ...]:
    """Dilations cut to where the furthest tap's shift still fits 32 bits; it is past every position anyway."""
    return tuple(min(dilation, 2**30 // taps) for dilation in dilations)


def _options(tile: table.Tile, tensor: Tensor, *, capped: bool) -> dict[str, int | None]:
    """Launch options. The register cap is for Hopper and channels that fill the tile: masks and others would spill."""
    registers = tile.registers if capped and wide.on_hopper(tensor) else None
    return {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": registers}


def _precision(tensor: Tensor) -> str:
    # Three tf32 products keep fp32's accuracy on the matrix units; 16-bit products are exact.
    return "tf32x3" if tensor.dtype == torch.float32 else "tf32"


def convolve(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    length: int,
    dilation: int,
    *,
    reverse: bool = False,
    residual: bool = False,
    guard: tuple[Tensor, Tensor] | None = None,
) -> None:
    """out = taps(source) with bias and source added on request; `reverse`: transposed taps looking ahead."""
    taps, channels_in, channels_out = weight.shape
    stride_in, stride_out = channels_out, 1
    if reverse:
        channels_in, channels_out = channels_out, channels_in
        stride_in, stride_out = stride_out, stride_in
    rows = source.shape[0]
    if out.numel() == 0:
        return
    if residual and guard is None and wide.fits(source, weight, out, length):
        wide.convolve(source, weight, out, length, *_shifts((dilation,), taps), reverse=reverse)
        return
    if channels_in == 0:
        # nothing to sum: what remains is the bias
        out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
        return
    hopper = wide.on_hopper(source)
    tile = table.conv_tile(channels_in, channels_out, source.dtype, interpreted=INTERPRETING, hopper=hopper)
    columns = -(-channels_out // tile.columns)
    conv_kernel[(-(-rows // tile.rows) * columns,)](
        source,
        weight,
        bias,
        out,
        rows,
        length,
        *_shifts((dilation,), taps),
        source.stride(0),
        weight.stride(0),
        stride_in,
        stride_out,
        columns,
        *(guard or (None, None)),
        IN=channels_in,
        OUT=channels_out,
        TAPS=taps,
        REVERSE=reverse,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        GUARD=guard is not None,
        GUARD_BLOCK=table.power_of_two(channels_out),
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **_options(tile, source, capped=channels_in % tile.depth == 0 and channels_out % tile.columns == 0),
    )


def block(
    source: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    out: Tensor,
    rstd: Tensor | None,
    length: int,
    dilation: int,
    eps: float,
    *,
    recompute: bool = False,
) -> None:
    """One layer into `out`; `recompute`: only the normalised rows, and only where the device finds them needed."""
    rows, channels = source.shape
    taps = weight.shape[0]
    if not table.fuses(channels, source.dtype):
        inner = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        guard = (norm_weight, norm_bias) if recompute else None
        convolve(source, weight, bias, inner, length, dilation, residual=True, guard=guard)
        norm_kernel[(rows,)](
            inner,
            norm_weight,
            norm_bias,
            out,
            rstd,
            rows,
            eps,
            CHANNELS=channels,
            AFFINE=not recompute,
            KEEP=rstd is not None,
            GUARD=recompute,
            BLOCK=table.power_of_two(channels),
        )
        return
    if not recompute and wide.fits(source, weight, out, length):
        vectors = (bias, norm_weight, norm_bias, rstd)
        wide.convolve(source, weight, out, length, *_shifts((dilation,), taps), norm=vectors, eps=eps)
        return
    hopper = wide.on_hopper(source)
    tile = table.block_tile(channels, source.dtype, interpreted=INTERPRETING, guarded=recompute, hopper=hopper)
    tiles = -(-rows // tile.rows)
    block_kernel[(min(tiles, table.GUARD_PROGRAMS) if recompute else tiles,)](
        source,
        weight,
        bias,
        norm_weight,
        norm_bias,
        out,
        rstd,
        rows,
        length,
        *_shifts((dilation,), taps),
        source.stride(0),
        eps,
        CHANNELS=channels,
        TAPS=taps,
        AFFINE=not recompute,
        KEEP=rstd is not None,
        GUARD=recompute,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **_options(tile, source, capped=not recompute and channels == tile.columns),
    )


def stack_at_once(
    source: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    hidden: Tensor,
    out: Tensor,
    rstd: Tensor,
    length: int,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> None:
    rows, channels = source.shape
    hopper = wide.on_hopper(source)
    tile = table.block_tile(channels, source.dtype, interpreted=INTERPRETING, guarded=False, hopper=hopper)
    span = max(1, tile.rows // length) * length
    stack_kernel[(-(-rows // span),)](
        source,
        weights,
        biases,
        norm_weights,
        norm_biases,
        hidden if keep else torch.empty_like(out),
        out,
        rstd,
        rows,
        length,
        span,
        source.stride(0),
        eps,
        DILATIONS=_shifts(dilations, weights.shape[1]),
        CHANNELS=channels,
        TAPS=weights.shape[1],
        KEEP=keep,
        ONE_TILE=span <= tile.rows,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **_options(tile, source, capped=channels == tile.columns),
    )


def weight_gradient(
    x: Tensor,
    hidden: Tensor,
    grad: Tensor,
    out: Tensor,
    length: int,
    dilations: Sequence[int],
    first_layer: int,
) -> None:
    """Gradient of the taps of `out.shape[0]` layers from `first_layer` on, into out (layers, K, Din, Dout)."""
    layers, taps, channels_in, channels_out = out.shape
    rows = x.shape[0]
    if out.numel() == 0 or rows == 0:
        out.zero_()
        return
    if channels_in == channels_out and wide.fits(x, grad, hidden, length):
        done = 0
        for partials in wide.weight_gradient(x, hidden, grad, out, length, _shifts(dilations, taps), first_layer):
            sum_partials(partials, out[done : done + partials.shape[1]])
            done += partials.shape[1]
        return
    tile = table.weight_tile(channels_in, channels_out, x.dtype, interpreted=INTERPRETING)
    jobs = layers * taps * -(-channels_in // tile.rows) * -(-channels_out // tile.columns)
    splits = max(1, min(table.WEIGHT_PROGRAMS // jobs, -(-rows // (8 * tile.depth))))
    steps = -(-rows // (splits * tile.depth))
    partials = x.new_empty(splits, *out.shape, dtype=torch.float32)
    weight_gradient_kernel[(jobs * splits,)](
        x,
        hidden,
        grad,
        partials,
        rows,
        length,
        steps,
        splits,
        first_layer,
        x.stride(0),
        grad.stride(-2),
        DILATIONS=_shifts(dilations, taps),
        IN=channels_in,
        OUT=channels_out,
        TAPS=taps,
        BLOCK_IN=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_ROWS=tile.depth,
        PRECISION=_precision(x),
        **_options(tile, x, capped=channels_in % tile.rows == 0 and channels_out % tile.columns == 0),
    )
    sum_partials(partials, out)


def norm_parts(rows: int, channels: int) -> int:
    """How many partial sums the LayerNorm backward leaves."""
    return _row_split(rows, channels)[0]


def norm_backward(
    grad: Tensor,
    out: Tensor,
    normalised: Tensor,
    rstd: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    grad_inner: Tensor,
    partials: Tensor,
    layer: int,
) -> None:
    """Gradient before LayerNorm into `grad_inner` and a layer's sums into `partials` (parts, 3, J, D)."""
    rows, channels = grad.shape
    programs, tiles, block_rows = _row_split(rows, channels)
    norm_backward_kernel[(programs,)](
        grad,
        out,
        normalised,
        rstd,
        norm_weight,
        norm_bias,
        grad_inner,
        partials[0, 0, layer],
        rows,
        tiles,
        grad.stride(0),
        partials.stride(1),
        CHANNELS=channels,
        BLOCK_ROWS=block_rows,
        BLOCK=table.power_of_two(channels),
        num_warps=4,
    )


def _row_split(rows: int, channels: int) -> tuple[int, int, int]:
    """Programs, tiles per program and rows per tile of a sum over rows."""
    block_rows = table.norm_rows(channels, interpreted=INTERPRETING)
    tiles = -(-rows // block_rows)
    programs = min(tiles, 3 if INTERPRETING else table.NORM_PROGRAMS)
    return programs, -(-tiles // programs), block_rows


def column_sum(values: Tensor, out: Tensor) -> None:
    rows, channels = values.shape
    if rows == 0 or channels == 0:
        out.zero_()
        return
    programs, tiles, block_rows = _row_split(rows, channels)
    partials = values.new_empty(programs, channels, dtype=torch.float32)
    column_sum_kernel[(programs,)](
        values,
        partials,
        rows,
        tiles,
        values.stride(0),
        CHANNELS=channels,
        BLOCK_ROWS=block_rows,
        BLOCK=table.power_of_two(channels),
    )
    sum_partials(partials, out)


def sum_vectors(partials: Tensor, norm_weights: Tensor, norm_biases: Tensor, biases: Tensor) -> None:
    """Add up the partial sums (parts, 3, J, D) of all layers into three (J, D)."""
    parts, block = _sum_block(partials.shape[0])
    count = biases.numel()
    sum_vectors_kernel[(-(-count // block), 3)](
        partials, norm_weights, norm_biases, biases, count, partials.shape[0], PARTS=parts, BLOCK=block
    )


def sum_partials(partials: Tensor, out: Tensor) -> None:
    """Add up partial sums (parts, *out.shape)."""
    parts, block = _sum_block(partials.shape[0])
    sum_partials_kernel[(-(-out.numel() // block),)](
        partials, out, out.numel(), partials.shape[0], PARTS=parts, BLOCK=block
    )


def _sum_block(parts: int) -> tuple[int, int]:
    return min(64, table.power_of_two(parts)), 64
