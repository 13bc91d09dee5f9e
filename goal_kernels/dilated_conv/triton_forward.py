"""Triton kernels that run the taps: the convolution, the fused block and the stack in one launch.

Sequences are flattened into rows, row = b * L + t. A tile of rows times all (or some) output channels is one fp32
accumulator; tap i adds the rows `dilation * i` higher up, masked where they would leave the sequence. The gradient of
the input is the same sum with the shift mirrored and the taps transposed (`REVERSE`).

Offsets are 64-bit scalars plus 32-bit tile offsets: 64-bit offset tensors cost the registers that the accumulator
needs.
"""

# The type checker knows neither Triton's launch syntax nor its values at compile time.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate_taps(
    accumulator,
    source,
    weight,
    first_row,
    positions,
    inside,
    first_column,
    stride_source,
    length,
    dilation,
    stride_tap,
    stride_in,
    stride_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TAPS: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`accumulator`, fp32 (BLOCK_ROWS, BLOCK_OUT), plus the sum over taps for one tile."""
    CHUNKS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    rows = tl.arange(0, BLOCK_ROWS)
    ins = tl.arange(0, BLOCK_IN)
    outs = first_column + tl.arange(0, BLOCK_OUT)
    # A count that only the device knows: unrolled, the loop would hold every step's addresses at once and spill.
    steps = tl.where(length > 0, TAPS * CHUNKS, 0)
    for step in range(steps):
        tap = step // CHUNKS
        first_in = (step % CHUNKS) * BLOCK_IN
        shift = tap * dilation
        if REVERSE:
            seen = inside & (positions + shift < length)
            base = source + (first_row + shift) * stride_source
        else:
            seen = inside & (positions >= shift)
            base = source + (first_row - shift) * stride_source
        seen = seen[:, None]
        wanted = (outs < OUT)[None, :]
        if IN % BLOCK_IN != 0:
            seen = seen & (first_in + ins < IN)[None, :]
            wanted = wanted & (first_in + ins < IN)[:, None]
        a = tl.load(base + (rows[:, None] * stride_source + (first_in + ins)[None, :]), mask=seen, other=0.0)
        taps = weight + tap * stride_tap + ((first_in + ins)[:, None] * stride_in + outs[None, :] * stride_out)
        if OUT % BLOCK_OUT == 0 and IN % BLOCK_IN == 0:  # noqa: SIM108 (decided when compiling)
            b = tl.load(taps)
        else:
            b = tl.load(taps, mask=wanted, other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def normalise(values, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of (BLOCK_ROWS, BLOCK) to mean 0 and variance 1 over their CHANNELS first columns; also 1 / deviation."""
    mean = tl.sum(values, 1) / CHANNELS
    centred = values - mean[:, None]
    if CHANNELS != BLOCK:
        centred = tl.where((tl.arange(0, BLOCK) < CHANNELS)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / CHANNELS + eps)
    return centred * rstd[:, None], rstd


@triton.jit
def must_recompute(norm_weight, norm_bias, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the normalised row cannot be read off the output, (out - norm_bias) / norm_weight, accurately.

    The output's rounding error, relative to the normalised value, grows by 1 + |norm_bias / norm_weight|; a tiny
    norm_weight also pushes fp16 outputs into subnormals.
    """
    columns = tl.arange(0, BLOCK)
    weight = tl.abs(tl.load(norm_weight + columns, mask=columns < CHANNELS, other=1.0).to(tl.float32))
    bias = tl.abs(tl.load(norm_bias + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32))
    trusted = (weight >= 0.015625) & (bias <= 2.0 * weight)
    return tl.min(trusted.to(tl.int32), 0) == 0


# Columns that get their norm parameters and are stored together: the accumulator's layout gives every thread a value of
# each parameter for most columns, and a whole row's worth of them would spill.
PIECE = tl.constexpr(64)


@triton.jit
def halves(values):
    """Left and right half of the columns."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    return tl.split(tl.permute(tl.reshape(values, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_piece(
    values, norm_weight, norm_bias, target, inside, first_column, CHANNELS: tl.constexpr, AFFINE: tl.constexpr
):
    """Norm parameters applied to some columns of a tile and the result stored."""
    rows = tl.arange(0, values.shape[0])
    columns = first_column + tl.arange(0, values.shape[1])
    real = columns < CHANNELS
    if AFFINE:
        gain = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        offset = tl.load(norm_bias + columns, mask=real, other=0.0).to(tl.float32)
        values = values * gain[None, :] + offset[None, :]
    place = target + (rows[:, None] * CHANNELS + columns[None, :])
    tl.store(place, values.to(target.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def block_tile(
    source,
    weight,
    bias,
    norm_weight,
    norm_bias,
    out,
    rstd_out,
    first_row,
    end_row,
    stride_source,
    length,
    dilation,
    eps,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    AFFINE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """LayerNorm(source + conv(source)) of the rows from `first_row` to before `end_row`, at most BLOCK_ROWS."""
    rows = tl.arange(0, BLOCK_ROWS)
    positions = ((first_row % length).to(tl.int32) + rows) % length
    inside = rows < end_row - first_row
    columns = tl.arange(0, BLOCK_OUT)
    real = columns < CHANNELS
    mask = inside[:, None] & real[None, :]
    # The residual starts the sum: loaded after it, it would be a second tile of registers beside the accumulator.
    values = tl.load(
        source + first_row * stride_source + (rows[:, None] * stride_source + columns[None, :]), mask=mask, other=0.0
    ).to(tl.float32)
    # In 16 bits the bias comes last: added before the loop, it would have the residual change its layout as fp32. In
    # wider tiles it would spill there.
    LATE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth == 16 and BLOCK_OUT <= 2 * PIECE
    if not LATE:
        values += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    values = accumulate_taps(
        values, source, weight, first_row, positions, inside, 0, stride_source, length, dilation,
        CHANNELS * CHANNELS, CHANNELS, 1, CHANNELS, CHANNELS, TAPS, False, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, PRECISION,
    )  # fmt: skip
    if LATE and BLOCK_OUT == 2 * PIECE:  # in two pieces, for the registers
        left, right = halves(values)
        near = tl.arange(0, PIECE)
        left += tl.load(bias + near, mask=near < CHANNELS, other=0.0).to(tl.float32)[None, :]
        right += tl.load(bias + PIECE + near, mask=PIECE + near < CHANNELS, other=0.0).to(tl.float32)[None, :]
        values = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BLOCK_ROWS, BLOCK_OUT))
    elif LATE:
        values += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    values, rstd = normalise(values, eps, CHANNELS, BLOCK_OUT)
    if KEEP:
        tl.store(rstd_out + first_row + rows, rstd, mask=inside)
    target = out + first_row * CHANNELS
    if BLOCK_OUT <= PIECE:
        store_piece(values, norm_weight, norm_bias, target, inside, 0, CHANNELS, AFFINE)
    elif BLOCK_OUT <= 2 * PIECE:
        left, right = halves(values)
        store_piece(left, norm_weight, norm_bias, target, inside, 0, CHANNELS, AFFINE)
        store_piece(right, norm_weight, norm_bias, target, inside, BLOCK_OUT // 2, CHANNELS, AFFINE)
    else:
        left, right = halves(values)
        first, second = halves(left)
        store_piece(first, norm_weight, norm_bias, target, inside, 0, CHANNELS, AFFINE)
        store_piece(second, norm_weight, norm_bias, target, inside, BLOCK_OUT // 4, CHANNELS, AFFINE)
        third, fourth = halves(right)
        store_piece(third, norm_weight, norm_bias, target, inside, BLOCK_OUT // 2, CHANNELS, AFFINE)
        store_piece(fourth, norm_weight, norm_bias, target, inside, BLOCK_OUT // 4 * 3, CHANNELS, AFFINE)


@triton.jit(do_not_specialize=["rows", "length", "dilation", "tile_columns"])
def conv_kernel(
    source,
    weight,
    bias,
    out,
    rows,
    length,
    dilation,
    stride_source,
    stride_tap,
    stride_in,
    stride_out,
    tile_columns,
    norm_weight,
    norm_bias,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TAPS: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GUARD: tl.constexpr,
    GUARD_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = bias + taps(source) (+ source where RESIDUAL), one tile a program; GUARD: only if must_recompute."""
    if GUARD:  # noqa: SIM102 (`and` would run both)
        if not must_recompute(norm_weight, norm_bias, OUT, GUARD_BLOCK):
            return
    tile = tl.program_id(0)
    first_row = (tile // tile_columns).to(tl.int64) * BLOCK_ROWS
    first_column = (tile % tile_columns) * BLOCK_OUT
    row = tl.arange(0, BLOCK_ROWS)
    positions = ((first_row % length).to(tl.int32) + row) % length
    inside = row < rows - first_row
    columns = first_column + tl.arange(0, BLOCK_OUT)
    mask = inside[:, None] & (columns < OUT)[None, :]
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    if RESIDUAL:
        place = source + first_row * stride_source + (row[:, None] * stride_source + columns[None, :])
        accumulator += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    accumulator = accumulate_taps(
        accumulator, source, weight, first_row, positions, inside, first_column, stride_source, length, dilation,
        stride_tap, stride_in, stride_out, IN, OUT, TAPS, REVERSE, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, PRECISION,
    )  # fmt: skip
    place = out + first_row * OUT + (row[:, None] * OUT + columns[None, :])
    tl.store(place, accumulator.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "length", "dilation"])
def block_kernel(
    source,
    weight,
    bias,
    norm_weight,
    norm_bias,
    out,
    rstd_out,
    rows,
    length,
    dilation,
    stride_source,
    eps,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    AFFINE: tl.constexpr,
    KEEP: tl.constexpr,
    GUARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One layer, one tile a program.

    GUARD: only if must_recompute, and programs take tiles in turn, so that few are launched: mostly they just end.
    """
    program = tl.program_id(0)
    if GUARD:
        if must_recompute(norm_weight, norm_bias, CHANNELS, BLOCK_OUT):
            programs = tl.num_programs(0)
            for turn in range(tl.cdiv(tl.cdiv(rows, BLOCK_ROWS) - program, programs)):
                first_row = (program.to(tl.int64) + turn * programs) * BLOCK_ROWS
                block_tile(
                    source, weight, bias, norm_weight, norm_bias, out, rstd_out, first_row, rows, stride_source,
                    length, dilation, eps, CHANNELS, TAPS, AFFINE, KEEP, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, PRECISION,
                )  # fmt: skip
    else:
        # outside a loop: what stays live around one would spill beside the accumulator
        block_tile(
            source, weight, bias, norm_weight, norm_bias, out, rstd_out, program.to(tl.int64) * BLOCK_ROWS, rows,
            stride_source, length, dilation, eps, CHANNELS, TAPS, AFFINE, KEEP, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN,
            PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "length", "span"])
def stack_kernel(
    x,
    weights,
    biases,
    norm_weights,
    norm_biases,
    hidden,
    out,
    rstd_out,
    rows,
    length,
    span,
    stride_x,
    eps,
    DILATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    KEEP: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All layers in one launch: a program carries its `span` rows (whole sequences) from layer to layer.

    What it wrote comes back from L2, shifted. KEEP: every layer has its own place in `hidden`, for the backward pass;
    otherwise layers alternate between `hidden` and `out` so that the last one lands in `out`.
    """
    LAYERS: tl.constexpr = len(DILATIONS)
    start = tl.program_id(0).to(tl.int64) * span
    end = tl.minimum(rows, start + span)
    slab = rows.to(tl.int64) * CHANNELS
    # A loop at run time, nothing hoisted out of it: unrolled or hoisted, the layers' addresses live together and spill.
    for layer in tl.range(LAYERS, disable_licm=True):
        if KEEP:
            before = hidden + (layer - 1) * slab
            target = tl.where(layer == LAYERS - 1, out, hidden + layer * slab)
        else:
            before = tl.where((LAYERS - layer) % 2 == 1, hidden, out)
            target = tl.where((LAYERS - layer) % 2 == 1, out, hidden)
        source = tl.where(layer == 0, x, before)
        stride_source = tl.where(layer == 0, stride_x, CHANNELS)
        dilation = layer * 0
        for candidate in tl.static_range(LAYERS):
            dilation = tl.where(layer == candidate, DILATIONS[candidate], dilation)
        weight = weights + layer * TAPS * CHANNELS * CHANNELS
        bias = biases + layer * CHANNELS
        norm_weight = norm_weights + layer * CHANNELS
        norm_bias = norm_biases + layer * CHANNELS
        rstd_layer = rstd_out + layer * rows.to(tl.int64)
        if ONE_TILE:
            block_tile(
                source, weight, bias, norm_weight, norm_bias, target, rstd_layer, start, end, stride_source, length,
                dilation, eps, CHANNELS, TAPS, True, KEEP, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, PRECISION,
            )  # fmt: skip
        else:
            for first in range(0, span, BLOCK_ROWS):
                block_tile(
                    source, weight, bias, norm_weight, norm_bias, target, rstd_layer, start + first, end,
                    stride_source, length, dilation, eps, CHANNELS, TAPS, True, KEEP, BLOCK_ROWS, BLOCK_OUT,
                    BLOCK_IN, PRECISION,
                )  # fmt: skip
        # the next layer reads rows that other threads of this program wrote
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    values,
    norm_weight,
    norm_bias,
    out,
    rstd_out,
    rows,
    eps,
    CHANNELS: tl.constexpr,
    AFFINE: tl.constexpr,
    KEEP: tl.constexpr,
    GUARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """LayerNorm of contiguous fp32 rows, one a program: rows too wide for the fused block."""
    if GUARD:  # noqa: SIM102 (`and` would run both)
        if not must_recompute(norm_weight, norm_bias, CHANNELS, BLOCK):
            return
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < CHANNELS
    loaded = tl.load(values + row * CHANNELS + columns, mask=real, other=0.0)
    normal, rstd = normalise(loaded[None, :], eps, CHANNELS, BLOCK)
    if AFFINE:
        gain = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        offset = tl.load(norm_bias + columns, mask=real, other=0.0).to(tl.float32)
        normal = normal * gain[None, :] + offset[None, :]
    if KEEP:
        tl.store(rstd_out + row + tl.arange(0, 1), rstd)
    place = out + row * CHANNELS + columns[None, :]
    tl.store(place, normal.to(out.dtype.element_ty), mask=real[None, :])
