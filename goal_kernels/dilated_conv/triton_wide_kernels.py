"""Kernels for wide rows on Hopper (sm_90), which has a tensor memory accelerator: tiles move by descriptor.

Descriptors see (batch, position, channel), and a load outside a sequence gives zeros: the causal edge needs no mask,
and operands go from memory to the matrix units without passing through registers. That leaves the registers to a
128 x 256 accumulator, which pointer loads do not. Used where tiles of 128 positions waste little of the sequence.
"""

# The type checker knows neither Triton's launch syntax nor its values at compile time.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl

from goal_kernels.dilated_conv.triton_forward import halves


@triton.jit(do_not_specialize=["tiles", "tiles_per_sequence", "length", "dilation"])
def wide_kernel(
    source,
    residual,
    weight,
    out,
    bias,
    norm_weight,
    norm_bias,
    rstd_out,
    tiles,
    tiles_per_sequence,
    length,
    dilation,
    eps,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    REVERSE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """source + taps(source), normalised where NORM (then with bias). REVERSE: the gradient towards the input.

    `source` and `residual` describe the same tensor in blocks of BLOCK_IN and CHANNELS / 2 columns, `out` like
    `residual`; `weight` is (K * Din, Dout). A persistent grid and one flattened loop over tiles and taps keep loads in
    flight across the epilogue, which works on half the columns at a time.
    """
    CHUNKS: tl.constexpr = CHANNELS // BLOCK_IN
    HALF: tl.constexpr = CHANNELS // 2
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, HALF)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        sequence = tile // tiles_per_sequence
        first = (tile % tiles_per_sequence) * BLOCK_ROWS
        accumulator = tl.zeros((BLOCK_ROWS, CHANNELS), tl.float32)
        for step in range(TAPS * CHUNKS):
            tap = step // CHUNKS
            chunk = (step % CHUNKS) * BLOCK_IN
            if REVERSE:
                a = source.load([sequence, first + tap * dilation, chunk])
                b = tl.trans(weight.load([tap * CHANNELS, chunk]))
            else:
                a = source.load([sequence, first - tap * dilation, chunk])
                b = weight.load([tap * CHANNELS + chunk, 0])
            accumulator = tl.dot(tl.reshape(a, (BLOCK_ROWS, BLOCK_IN)), b, accumulator)
        left, right = halves(accumulator)
        left += tl.reshape(residual.load([sequence, first, 0]), (BLOCK_ROWS, HALF)).to(tl.float32)
        right += tl.reshape(residual.load([sequence, first, HALF]), (BLOCK_ROWS, HALF)).to(tl.float32)
        if NORM:
            left += tl.load(bias + columns).to(tl.float32)[None, :]
            right += tl.load(bias + HALF + columns).to(tl.float32)[None, :]
            mean = (tl.sum(left, 1) + tl.sum(right, 1)) / CHANNELS
            left -= mean[:, None]
            right -= mean[:, None]
            rstd = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / CHANNELS + eps)
            if KEEP:
                place = rstd_out + sequence.to(tl.int64) * length + first + rows
                tl.store(place, rstd, mask=rows < length - first)
            left = left * rstd[:, None] * tl.load(norm_weight + columns).to(tl.float32)[None, :]
            left += tl.load(norm_bias + columns).to(tl.float32)[None, :]
        out.store([sequence, first, 0], tl.reshape(left, (1, BLOCK_ROWS, HALF)).to(out.dtype))
        if NORM:
            right = right * rstd[:, None] * tl.load(norm_weight + HALF + columns).to(tl.float32)[None, :]
            right += tl.load(norm_bias + HALF + columns).to(tl.float32)[None, :]
        out.store([sequence, first, HALF], tl.reshape(right, (1, BLOCK_ROWS, HALF)).to(out.dtype))


@triton.jit(do_not_specialize=["batch", "steps", "steps_per_sequence", "total", "splits", "first_layer"])
def wide_weight_gradient_kernel(
    source,
    grad,
    partials,
    batch,
    steps,
    steps_per_sequence,
    total,
    splits,
    first_layer,
    DILATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A share of the gradient of the taps of the layers from `first_layer` on.

    `source` and `grad` are (layers * B, L, D). A program has BLOCK_IN input channels of one tap of one layer, all
    output channels, and `steps` steps of BLOCK_ROWS positions out of the layer's `total`. Written to
    (splits, layers, K, Din, Dout).
    """
    TILES: tl.constexpr = CHANNELS // BLOCK_IN
    job = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    layer = job // (TAPS * TILES)
    tap = job // TILES % TAPS
    first_in = job % TILES * BLOCK_IN
    dilation = layer * 0
    for candidate in tl.static_range(len(DILATIONS)):
        dilation = tl.where(first_layer + layer == candidate, DILATIONS[candidate], dilation)
    shift = tap * dilation
    accumulator = tl.zeros((BLOCK_IN, CHANNELS), tl.float32)
    first = split * steps
    for step in range(first, tl.minimum(first + steps, total)):
        sequence = layer * batch + step // steps_per_sequence
        position = step % steps_per_sequence * BLOCK_ROWS
        a = tl.reshape(source.load([sequence, position - shift, first_in]), (BLOCK_ROWS, BLOCK_IN))
        b = tl.reshape(grad.load([sequence, position, 0]), (BLOCK_ROWS, CHANNELS))
        accumulator = tl.dot(tl.trans(a), b, accumulator)
    layers = tl.num_programs(0) // splits // (TAPS * TILES)
    ins = first_in + tl.arange(0, BLOCK_IN)
    outs = tl.arange(0, CHANNELS)
    place = partials + ((split.to(tl.int64) * layers + layer) * TAPS + tap) * (CHANNELS * CHANNELS)
    tl.store(place + (ins[:, None] * CHANNELS + outs[None, :]), accumulator)
