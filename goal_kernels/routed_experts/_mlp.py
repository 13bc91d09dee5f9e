"""Expert kernels: forward, and the backward pass of the hidden layer and of the weights. Layouts: see _router.py.

Strides: z, the expert matrices and all outputs are contiguous. Offsets of a row or an expert are int64 scalars or
columns; offsets inside a tile are int32.
"""

# A kernel's source is Triton's language, in which Python's types do not hold:
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from goal_kernels.routed_experts._activation import activate, activate_with_slope
from goal_kernels.routed_experts._router import route_rows, store_routing


@triton.jit
def rows_of_tile(
    tile, dispatch, weights, experts_of, tokens, padded_tokens, positions, experts, K: tl.constexpr,
    DENSE: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Expert of a tile (E or more: none), its tokens, which of them are real, and the share of each in the output."""
    if DENSE:
        expert = tile * BM // padded_tokens
        rows = tile * BM - expert * padded_tokens + tl.arange(0, BM)
        there = rows < tokens
        share = tl.zeros([BM], tl.float32)
        for slot in tl.static_range(K):
            wide = rows.to(tl.int64) * K + slot
            mine = tl.load(experts_of + wide, there, other=-1) == expert
            share += tl.where(mine, tl.load(weights + wide, there, other=0.0), 0.0)
        return expert, rows, there, share
    else:
        by_position = dispatch + experts + 1 + tokens * K
        rows = tl.load(by_position + tile * BM + tl.arange(0, BM))
        share = tl.load(by_position + positions + tile * BM + tl.arange(0, BM)).to(tl.float32, bitcast=True)
        return tl.load(by_position + 2 * positions + tile), rows, rows >= 0, share


@triton.jit
def expert_rows(
    x, expert, w1, b1, w2, b2, channels, hidden, first, last, DESCRIPTORS: tl.constexpr, BH: tl.constexpr,
    DP: tl.constexpr, ACTIVATION: tl.constexpr, TANH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One expert on a tile of rows `x [BM, DP]`; the hidden layer stays on the chip, `BH` channels at a time.

    Of the hidden channels from `first` to before `last`; whoever has the first of them adds the output's bias.
    DESCRIPTORS: w1 and w2 are tensor descriptors of `(E * D, H)` and `(E * H, D)`, for sizes that fill their blocks.
    """
    wide = expert.to(tl.int64)
    d = tl.arange(0, DP)
    out = tl.zeros([x.shape[0], DP], tl.float32)
    for start in range(first, last, BH):
        h = start + tl.arange(0, BH)
        if DESCRIPTORS:
            left = w1.load([expert * channels, start]).to(DOT)
            right = w2.load([expert * hidden + start, 0]).to(DOT)
        else:
            offset = wide * channels * hidden
            inside = (d < channels)[:, None] & (h < hidden)[None, :]
            left = tl.load(w1 + offset + d[:, None] * hidden + h[None, :], inside, other=0.0).to(DOT)
            inside = (h < hidden)[:, None] & (d < channels)[None, :]
            right = tl.load(w2 + offset + h[:, None] * channels + d[None, :], inside, other=0.0).to(DOT)
        pre = tl.dot(x, left, input_precision=PRECISION)
        pre += tl.load(b1 + wide * hidden + h, h < hidden, other=0.0).to(tl.float32)[None, :]
        out = tl.dot(activate(pre, ACTIVATION, TANH).to(DOT), right, out, input_precision=PRECISION)
    return out + tl.load(b2 + wide * channels + d, (d < channels) & (first == 0), other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["tokens", "per_group", "padded_tokens"])
def mixture_kernel(
    z, condition, gate_weight, w1, b1, w2, b2, out, probabilities_out, weights_out, experts_out,
    tokens, per_group, padded_tokens, channels, condition_channels, hidden, experts, condition_g, condition_d,
    K: tl.constexpr, EP: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr, DP: tl.constexpr, ACTIVATION: tl.constexpr, TANH: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, ROUTER: tl.constexpr, ROUTER_PRECISION: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    """Few tokens: router and experts in one launch, the router on the experts' tile where RESIDENT.

    SINGLE: a program takes all experts and writes the result; else it takes a SPLIT-th of one expert's hidden channels
    and writes its part to the dense layout, which has SPLIT copies of all experts, and `combine_kernel` adds them up.
    """
    tiles = padded_tokens // BM
    own = tl.program_id(0) // tiles
    rows = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    there = rows < tokens
    ids = tl.arange(0, EP)[None, :]
    d = tl.arange(0, DP)[None, :]
    inside = there[:, None] & (d < channels)
    if RESIDENT:
        x = tl.load(z + rows.to(tl.int64)[:, None] * channels + d, inside, other=0.0).to(DOT)
        probabilities, weights, slots = route_rows(
            x, condition, gate_weight, rows, tokens, per_group, channels, condition_channels, experts, condition_g,
            condition_d, K, EP, BD, ROUTER, ROUTER_PRECISION, True
        )  # fmt: skip
    else:
        probabilities, weights, slots = route_rows(
            z, condition, gate_weight, rows, tokens, per_group, channels, condition_channels, experts, condition_g,
            condition_d, K, EP, BD, ROUTER, ROUTER_PRECISION, False
        )  # fmt: skip
        x = tl.load(z + rows.to(tl.int64)[:, None] * channels + d, inside, other=0.0).to(DOT)
    if own == 0:
        store_routing(
            probabilities_out, weights_out, experts_out, probabilities, weights, slots, rows, tokens, experts, K
        )
    if SINGLE:
        total = tl.zeros([BM, DP], tl.float32)
        for expert in range(0, experts):
            chosen = (slots >= 0) & (ids == expert) & there[:, None]
            if tl.sum(chosen.to(tl.int32)) > 0:
                share = tl.sum(tl.where(chosen, weights, 0.0), axis=1)[:, None]
                values = expert_rows(
                    x, own + expert, w1, b1, w2, b2, channels, hidden, 0, hidden, False, BH, DP, ACTIVATION, TANH, DOT,
                    PRECISION
                )  # fmt: skip
                total += tl.where(share == 0.0, 0.0, share * values)
        tl.store(out + rows.to(tl.int64)[:, None] * channels + d, total.to(out.dtype.element_ty), inside)
    else:
        expert = own
        first = 0
        last = hidden
        if SPLIT > 1:
            expert = own % experts
            width = tl.cdiv(tl.cdiv(hidden, BH), SPLIT) * BH
            first = own // experts * width
            last = tl.minimum(first + width, hidden)
        share = tl.sum(tl.where((slots >= 0) & (ids == expert), weights, 0.0), axis=1)[:, None]
        values = expert_rows(
            x, expert, w1, b1, w2, b2, channels, hidden, first, last, False, BH, DP, ACTIVATION, TANH, DOT, PRECISION
        )  # fmt: skip
        position = (own * padded_tokens + rows).to(tl.int64)[:, None]
        values = tl.where(share == 0.0, 0.0, share * values)
        tl.store(out + position * channels + d, values.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens", "positions"])
def experts_kernel(
    z, w1, b1, w2, b2, dispatch, out, tokens, positions, channels, hidden, experts,
    K: tl.constexpr, DESCRIPTORS: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    DP: tl.constexpr, ACTIVATION: tl.constexpr, TANH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Many tokens: a program takes a tile of one expert's tokens through the whole expert."""
    tile = tl.program_id(0)
    expert, rows, there, share = rows_of_tile(
        tile, dispatch, dispatch, dispatch, tokens, tokens, positions, experts, K, False, BM
    )
    if expert < experts:
        d = tl.arange(0, DP)[None, :]
        inside = there[:, None] & (d < channels)
        x = tl.load(z + rows.to(tl.int64)[:, None] * channels + d, inside, other=0.0).to(DOT)
        # Read from memory, it could be any number: the bound shows that a descriptor's row fits 32 bits
        expert = tl.minimum(expert, experts - 1)
        values = expert_rows(
            x, expert, w1, b1, w2, b2, channels, hidden, 0, hidden, DESCRIPTORS, BH, DP, ACTIVATION, TANH, DOT,
            PRECISION
        )  # fmt: skip
        base = out + tile.to(tl.int64) * BM * channels
        local = tl.arange(0, BM)[:, None] * channels + d
        tl.store(base + local, (share[:, None] * values).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens", "padded_tokens", "positions"])
def grouped_matmul_kernel(
    values, matrix, bias, weights, experts_of, dispatch, out, tokens, padded_tokens, positions, depth, width, experts,
    matrix_k, matrix_n,
    K: tl.constexpr, GATHER: tl.constexpr, SHARE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, TANH: tl.constexpr, DENSE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`out[position] = values @ matrix[expert]`, with bias, activation and the token's share where asked.

    GATHER: `values` are tokens, read through the sorted order; otherwise they are rows by position.
    """
    columns = tl.cdiv(width, BN)
    tile = tl.program_id(0) // columns
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    expert, rows, there, share = rows_of_tile(
        tile, dispatch, weights, experts_of, tokens, padded_tokens, positions, experts, K, DENSE, BM
    )
    if expert < experts:
        local = tl.arange(0, BM)
        if GATHER:
            left = values + rows.to(tl.int64)[:, None] * depth
        else:
            left = values + tile.to(tl.int64) * BM * depth + local[:, None] * depth
        wide = expert.to(tl.int64)
        right = matrix + wide * depth * width
        total = tl.zeros([BM, BN], tl.float32)
        for start in range(0, depth, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(left + k[None, :], there[:, None] & (k < depth)[None, :], other=0.0).to(DOT)
            inside = (k < depth)[:, None] & (n < width)[None, :]
            b = tl.load(right + k[:, None] * matrix_k + n[None, :] * matrix_n, inside, other=0.0).to(DOT)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias + wide * width + n, n < width, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "none":
            total = activate(total, ACTIVATION, TANH)
        if SHARE:
            total *= share[:, None]
        base = out + tile.to(tl.int64) * BM * width
        inside = there[:, None] & (n < width)[None, :]
        tl.store(base + local[:, None] * width + n[None, :], total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens", "padded_tokens", "positions"])
def hidden_backward_kernel(
    z, upstream, w1, b1, w2, b2, weights, experts_of, dispatch, scaled, slopes, share_gradient, share_by_position,
    z_sorted, upstream_sorted, tokens, padded_tokens, positions, channels, hidden, experts,
    K: tl.constexpr, DENSE: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, TANH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Recompute the hidden layer of a tile and differentiate it.

    Writes `share * hidden` (for w2's gradient), the gradient before the activation (for w1's and z's), and this block
    of hidden channels' part of the gradient of each token's share, which needs no output of the forward pass:
    `dy . (hidden @ w2 + b2) = hidden . (dy @ w2.T) + dy . b2`. The first block also writes, by position, the shares in
    the dense layout and z and the upstream gradient in the sorted one: the gradients of the weights then read them in a
    row.
    """
    blocks = tl.cdiv(hidden, BH)
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    h = block * BH + tl.arange(0, BH)
    expert, rows, there, share = rows_of_tile(
        tile, dispatch, weights, experts_of, tokens, padded_tokens, positions, experts, K, DENSE, BM
    )
    if expert < experts:
        wide = expert.to(tl.int64)
        first = w1 + wide * channels * hidden
        second = w2 + wide * channels * hidden
        token = rows.to(tl.int64)[:, None] * channels
        pre = tl.zeros([BM, BH], tl.float32)
        back = tl.zeros([BM, BH], tl.float32)
        gain = tl.zeros([BM], tl.float32)
        for start in range(0, channels, BK):
            d = start + tl.arange(0, BK)
            inside = there[:, None] & (d < channels)[None, :]
            x = tl.load(z + token + d[None, :], inside, other=0.0).to(DOT)
            dy = tl.load(upstream + token + d[None, :], inside, other=0.0)
            inside = (d < channels)[:, None] & (h < hidden)[None, :]
            up = tl.load(first + d[:, None] * hidden + h[None, :], inside, other=0.0).to(DOT)
            down = tl.load(second + h[None, :] * channels + d[:, None], inside, other=0.0).to(DOT)
            pre = tl.dot(x, up, pre, input_precision=PRECISION)
            back = tl.dot(dy.to(DOT), down, back, input_precision=PRECISION)
            if block == 0:
                shift = tl.load(b2 + wide * channels + d, d < channels, other=0.0).to(tl.float32)
                gain += tl.sum(dy.to(tl.float32) * shift[None, :], axis=1)
                if not DENSE:
                    copy = tile.to(tl.int64) * BM * channels + tl.arange(0, BM)[:, None] * channels + d[None, :]
                    tl.store(z_sorted + copy, x.to(z_sorted.dtype.element_ty), (d < channels)[None, :])
                    tl.store(upstream_sorted + copy, dy, (d < channels)[None, :])
        pre += tl.load(b1 + wide * hidden + h, h < hidden, other=0.0).to(tl.float32)[None, :]
        value, slope = activate_with_slope(pre, ACTIVATION, TANH)
        gain += tl.sum(value * back, axis=1)
        local = tl.arange(0, BM)
        # A share of zero (padding, or an expert that was not chosen) gives exactly zero, whatever it multiplies.
        used = (share != 0.0)[:, None]
        offset = tile.to(tl.int64) * BM
        base = local[:, None] * hidden + h[None, :]
        inside = (h < hidden)[None, :]
        value = tl.where(used, share[:, None] * value, 0.0)
        tl.store(scaled + offset * hidden + base, value.to(scaled.dtype.element_ty), inside)
        back = tl.where(used, share[:, None] * back * slope, 0.0)
        tl.store(slopes + offset * hidden + base, back.to(slopes.dtype.element_ty), inside)
        tl.store(share_gradient + (offset + local) * blocks + block, gain)
        if DENSE:  # noqa: SIM102 (decided when compiling)
            if block == 0:
                tl.store(share_by_position + offset + local, share)


@triton.jit(do_not_specialize=["tokens", "padded_tokens"])
def weight_gradient_kernel(
    z, upstream, scaled, slopes, share, dispatch, w1_out, b1_out, w2_out, b2_out,
    tokens, padded_tokens, channels, hidden, experts, DENSE: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Gradients of w1, b1 (`which` 0) and w2, b2 (`which` 1): a program adds up one tile over its expert's rows.

    Both are tokens transposed times hidden rows; w2's comes out transposed. With SPLIT above 1 the rows are shared out
    and each part is written apart, for `sum_kernel` to add in order.
    """
    channel_blocks = tl.cdiv(channels, BD)
    hidden_blocks = tl.cdiv(hidden, BH)
    program = tl.program_id(0)
    part = program % SPLIT
    program = program // SPLIT
    channel_block = program % channel_blocks
    program = program // channel_blocks
    hidden_block = program % hidden_blocks
    program = program // hidden_blocks
    which = program % 2
    expert = program // 2
    d = channel_block * BD + tl.arange(0, BD)
    h = hidden_block * BH + tl.arange(0, BH)
    if DENSE:
        begin = expert * padded_tokens
        end = begin + padded_tokens
    else:
        begin = tl.load(dispatch + expert)
        end = tl.load(dispatch + expert + 1)
    steps = tl.cdiv(tl.cdiv(end - begin, BM), SPLIT)
    lower = begin + part * steps * BM
    end = tl.minimum(end, lower + steps * BM)
    if which == 0:
        outer = z
        inner = slopes
    else:
        outer = upstream
        inner = scaled
    total = tl.zeros([BD, BH], tl.float32)
    hidden_bias = tl.zeros([BH], tl.float32)
    channel_bias = tl.zeros([BD], tl.float32)
    for start in range(lower, end, BM):
        # In the dense layout a row is a token, and rows past the last token are nobody's; in the sorted one they are
        # zeros.
        local = tl.arange(0, BM)
        first = tl.cast(start, tl.int64)
        inside = (d < channels)[:, None]
        if DENSE:
            first -= begin
            inside = inside & (first + local < tokens)[None, :]
        left = tl.load(outer + first * channels + local[None, :] * channels + d[:, None], inside, other=0.0)
        source = inner + tl.cast(start, tl.int64) * hidden + local[:, None] * hidden + h[None, :]
        right = tl.load(source, (h < hidden)[None, :], other=0.0)
        total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision=PRECISION)
        if which == 0:
            if channel_block == 0:
                hidden_bias += tl.sum(right.to(tl.float32), axis=0)
        elif hidden_block == 0:
            part_share = tl.load(share + tl.cast(start, tl.int64) + local)[None, :]
            channel_bias += tl.sum(tl.where(part_share == 0.0, 0.0, part_share * left.to(tl.float32)), axis=1)
    slab = (part * experts + expert).to(tl.int64)
    inside = (d < channels)[:, None] & (h < hidden)[None, :]
    if which == 0:
        out = w1_out + slab * channels * hidden + d[:, None] * hidden + h[None, :]
        tl.store(out, total.to(w1_out.dtype.element_ty), inside)
        if channel_block == 0:
            tl.store(b1_out + slab * hidden + h, hidden_bias.to(b1_out.dtype.element_ty), h < hidden)
    else:
        out = w2_out + slab * channels * hidden + h[None, :] * channels + d[:, None]
        tl.store(out, total.to(w2_out.dtype.element_ty), inside)
        if hidden_block == 0:
            tl.store(b2_out + slab * channels + d, channel_bias.to(b2_out.dtype.element_ty), d < channels)


@triton.jit
def add_parts(parts, out, block, elements, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * elements + index, index < elements, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), index < elements)


@triton.jit
def sum_kernel(
    w1_parts, b1_parts, w2_parts, b2_parts, w1, b1, w2, b2, matrix, hidden_bias, channel_bias,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the parts of a split `weight_gradient_kernel` in their order. Sizes are those of one part."""
    program = tl.program_id(0)
    blocks = tl.cdiv(matrix, BLOCK)
    if program < blocks:
        add_parts(w1_parts, w1, program, matrix, SPLIT, BLOCK)
    elif program < 2 * blocks:
        add_parts(w2_parts, w2, program - blocks, matrix, SPLIT, BLOCK)
    elif program < 2 * blocks + tl.cdiv(hidden_bias, BLOCK):
        add_parts(b1_parts, b1, program - 2 * blocks, hidden_bias, SPLIT, BLOCK)
    else:
        add_parts(b2_parts, b2, program - 2 * blocks - tl.cdiv(hidden_bias, BLOCK), channel_bias, SPLIT, BLOCK)
