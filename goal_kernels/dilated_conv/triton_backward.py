"""Triton kernels of the backward pass: through LayerNorm, into the taps, and the sums of both.

Sums over rows are split over a fixed number of programs, written as fp32 partial sums and added up in one order by
`sum_partials_kernel`: no atomics, so every run gives the same bits.
"""

# The type checker knows neither Triton's launch syntax nor its values at compile time.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl

from goal_kernels.dilated_conv.triton_forward import must_recompute


@triton.jit(do_not_specialize=["rows", "tiles"])
def norm_backward_kernel(
    grad,
    out,
    normalised,
    rstd,
    norm_weight,
    norm_bias,
    grad_inner,
    partials,
    rows,
    tiles,
    stride_grad,
    stride_part,
    CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient before LayerNorm, (R, D), and this program's share of the gradients of norm weight, norm bias and bias.

    The normalised rows are read off the block's output, or, where that would be inaccurate, off `normalised`, which a
    guarded launch filled just before.
    """
    recomputed = must_recompute(norm_weight, norm_bias, CHANNELS, BLOCK)
    row = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    real = columns < CHANNELS
    gain = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
    offset = tl.load(norm_bias + columns, mask=real, other=0.0).to(tl.float32)
    inverse = tl.where(recomputed, 1.0, 1.0 / tl.where(gain == 0.0, 1.0, gain))
    offset = tl.where(recomputed, 0.0, offset)
    normal_rows = tl.where(recomputed, normalised, out)
    sum_weight = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    sum_inner = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    program = tl.program_id(0)
    for tile in range(tiles):
        first_row = (program.to(tl.int64) * tiles + tile) * BLOCK_ROWS
        inside = row < rows - first_row
        mask = inside[:, None] & real[None, :]
        place = row[:, None] * CHANNELS + columns[None, :]
        upstream = tl.load(
            grad + first_row * stride_grad + (row[:, None] * stride_grad + columns[None, :]), mask=mask, other=0.0
        ).to(tl.float32)
        normal = tl.load(normal_rows + first_row * CHANNELS + place, mask=mask, other=0.0).to(tl.float32)
        normal = tl.where(mask, (normal - offset[None, :]) * inverse[None, :], 0.0)
        scale = tl.load(rstd + first_row + row, mask=inside, other=0.0)
        weighted = upstream * gain[None, :]
        mean = tl.sum(weighted, 1) / CHANNELS
        projection = tl.sum(weighted * normal, 1) / CHANNELS
        inner = (weighted - mean[:, None] - normal * projection[:, None]) * scale[:, None]
        inner = tl.where(mask, inner, 0.0)
        tl.store(grad_inner + first_row * CHANNELS + place, inner.to(grad_inner.dtype.element_ty), mask=mask)
        sum_weight += upstream * normal
        sum_bias += upstream
        sum_inner += inner
    place = partials + program.to(tl.int64) * 3 * stride_part + columns
    tl.store(place, tl.sum(sum_weight, 0), mask=real)
    tl.store(place + stride_part, tl.sum(sum_bias, 0), mask=real)
    tl.store(place + 2 * stride_part, tl.sum(sum_inner, 0), mask=real)


@triton.jit(do_not_specialize=["rows", "tiles"])
def column_sum_kernel(
    values,
    partials,
    rows,
    tiles,
    stride_values,
    CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This program's share of the sum over rows: the gradient of the plain convolution's bias."""
    row = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    program = tl.program_id(0)
    for tile in range(tiles):
        first_row = (program.to(tl.int64) * tiles + tile) * BLOCK_ROWS
        mask = (row < rows - first_row)[:, None] & (columns < CHANNELS)[None, :]
        place = values + first_row * stride_values + (row[:, None] * stride_values + columns[None, :])
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    place = partials + program.to(tl.int64) * CHANNELS + columns
    tl.store(place, tl.sum(total, 0), mask=columns < CHANNELS)


@triton.jit(do_not_specialize=["rows", "length", "steps", "splits", "first_layer"])
def weight_gradient_kernel(
    x,
    hidden,
    grad,
    partials,
    rows,
    length,
    steps,
    splits,
    first_layer,
    stride_x,
    stride_grad,
    DILATIONS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A share of the gradient of the taps of some layers: sum over rows of source[row - shift]^T grad[row].

    A program has one tile of one tap of one layer and one of `splits` ranges of rows. Layer 0 reads `x`, layer j the
    (j-1)-th slab of `hidden`; `grad` holds the layers from `first_layer` on. Written to (splits, layers, K, Din, Dout).
    """
    TILES_IN: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    TILES_OUT: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    TILES: tl.constexpr = TAPS * TILES_IN * TILES_OUT
    job = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    slab = job // TILES
    layer = first_layer + slab
    tap = job % TILES // (TILES_IN * TILES_OUT)
    first_in = job % (TILES_IN * TILES_OUT) // TILES_OUT * BLOCK_IN
    first_out = job % TILES_OUT * BLOCK_OUT

    dilation = layer * 0
    for candidate in tl.static_range(len(DILATIONS)):
        dilation = tl.where(layer == candidate, DILATIONS[candidate], dilation)
    shift = tap * dilation
    source = tl.where(layer == 0, x, hidden + (layer - 1) * (rows.to(tl.int64) * IN))
    stride_source = tl.where(layer == 0, stride_x, IN)
    upstream = grad + slab * (rows.to(tl.int64) * OUT)

    row = tl.arange(0, BLOCK_ROWS)
    ins = first_in + tl.arange(0, BLOCK_IN)
    outs = first_out + tl.arange(0, BLOCK_OUT)
    accumulator = tl.zeros((BLOCK_IN, BLOCK_OUT), tl.float32)
    start = split.to(tl.int64) * steps * BLOCK_ROWS
    position = (start % length).to(tl.int32)
    for step in range(steps):
        first_row = start + step * BLOCK_ROWS
        positions = (position + step * BLOCK_ROWS + row) % length
        inside = row < rows - first_row
        seen = inside & (positions >= shift)
        a = tl.load(
            source + (first_row - shift) * stride_source + (row[:, None] * stride_source + ins[None, :]),
            mask=seen[:, None] & (ins < IN)[None, :],
            other=0.0,
        )
        b = tl.load(
            upstream + first_row * stride_grad + (row[:, None] * stride_grad + outs[None, :]),
            mask=inside[:, None] & (outs < OUT)[None, :],
            other=0.0,
        )
        accumulator = tl.dot(tl.trans(a), b, accumulator, input_precision=PRECISION)
    jobs = tl.num_programs(0) // splits // TILES
    place = partials + ((split.to(tl.int64) * jobs + slab) * TAPS + tap) * (IN * OUT)
    mask = (ins < IN)[:, None] & (outs < OUT)[None, :]
    tl.store(place + (ins[:, None] * OUT + outs[None, :]), accumulator, mask=mask)


@triton.jit
def total_over_parts(partials, stride_part, index, count, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over parts of partials[part * stride_part + index], always in the same order."""
    part = tl.arange(0, PARTS)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first_part in range(0, parts, PARTS):
        mask = (first_part + part < parts)[:, None] & (index < count)[None, :]
        place = (first_part + part).to(tl.int64)[:, None] * stride_part + index[None, :]
        total += tl.load(partials + place, mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["count", "parts"])
def sum_partials_kernel(partials, out, count, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out (count) = sum over parts of partials (parts, count)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = total_over_parts(partials, count, index, count, parts, PARTS, BLOCK)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < count)


@triton.jit(do_not_specialize=["count", "parts"])
def sum_vectors_kernel(partials, norm_weight, norm_bias, bias, count, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Three vectors of `count` from partials (parts, 3, count): gradients of norm weight, norm bias and bias."""
    which = tl.program_id(1)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = total_over_parts(partials + which * count, 3 * count, index, count, parts, PARTS, BLOCK)
    if which == 0:
        tl.store(norm_weight + index, total.to(norm_weight.dtype.element_ty), mask=index < count)
    elif which == 1:
        tl.store(norm_bias + index, total.to(norm_bias.dtype.element_ty), mask=index < count)
    else:
        tl.store(bias + index, total.to(bias.dtype.element_ty), mask=index < count)
