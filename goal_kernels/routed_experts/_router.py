"""Router kernels: gate, top k, sorting of tokens by expert, and the gate's backward pass.

Shapes as in the package's docstring. A "pair" is one token at one of its k experts, `pair = token * k + slot`; its
"position" is its row in the sorted order, where each expert's rows are padded to a multiple of the row tile so that no
tile crosses experts. In the dense layout every expert holds every token: position = expert * (padded N) + token.

`dispatch` is one int32 buffer: E + 1 offsets (first position of each expert, and the end), N*k positions by pair, the
token at each position (-1: padding), its share in the output (the bits of a float, 0: padding), and each tile's expert
(E: none).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_rows(
    z,
    condition,
    gate_weight,
    rows,
    tokens,
    per_group,
    channels,
    condition_channels,
    experts,
    condition_g,
    condition_d,
    K: tl.constexpr,
    EP: tl.constexpr,
    BD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """Route a tile of tokens: probabilities, weights and slot (-1: not chosen) of each expert, all `[rows, EP]`.

    RESIDENT: `z` is the tile itself, all channels of `rows`, in the type of the products.
    """
    there = rows < tokens
    ids = tl.arange(0, EP)
    step = tl.arange(0, BD)
    width = channels + condition_channels
    gate_rows = gate_weight + ids[None, :] * width
    logits = tl.zeros([rows.shape[0], EP], tl.float32)
    if RESIDENT:
        every = tl.arange(0, z.shape[1])[:, None]
        gate = tl.load(gate_rows + every, (ids < experts)[None, :] & (every < channels), other=0.0).to(DOT)
        logits = tl.dot(z, gate, logits, input_precision=PRECISION)
    else:
        z_rows = z + rows.to(tl.int64)[:, None] * channels
        for start in range(0, channels, BD):
            d = start + step
            left = tl.load(z_rows + d[None, :], there[:, None] & (d < channels)[None, :], other=0.0).to(DOT)
            inside = (ids < experts)[None, :] & (d < channels)[:, None]
            right = tl.load(gate_rows + d[:, None], inside, other=0.0).to(DOT)
            logits = tl.dot(left, right, logits, input_precision=PRECISION)
    condition_rows = condition + (rows // per_group).to(tl.int64)[:, None] * condition_g
    for start in range(0, condition_channels, BD):
        d = start + step
        inside = there[:, None] & (d < condition_channels)[None, :]
        left = tl.load(condition_rows + d[None, :] * condition_d, inside, other=0.0).to(DOT)
        inside = (ids < experts)[None, :] & (d < condition_channels)[:, None]
        right = tl.load(gate_rows + channels + d[:, None], inside, other=0.0).to(DOT)
        logits = tl.dot(left, right, logits, input_precision=PRECISION)

    real = (ids < experts)[None, :]
    logits = tl.where(real, logits, float("-inf"))
    exponential = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probabilities = exponential / tl.sum(exponential, axis=1)[:, None]
    # As in eager: k times the first maximum, NaN above all, taken experts below all, columns of padding never.
    remaining = tl.where(probabilities == probabilities, probabilities, 2.0)
    remaining = tl.where(real, remaining, -2.0)
    slots = tl.full([rows.shape[0], EP], -1, tl.int32)
    for slot in tl.static_range(K):
        best = tl.max(remaining, axis=1)
        chosen = tl.min(tl.where(remaining == best[:, None], ids[None, :], EP), axis=1)
        taken = ids[None, :] == chosen[:, None]
        slots = tl.where(taken, slot, slots)
        remaining = tl.where(taken, -1.0, remaining)
    kept = tl.where(slots >= 0, probabilities, 0.0)
    return probabilities, kept / tl.sum(kept, axis=1)[:, None], slots


@triton.jit
def store_routing(
    probabilities_out, weights_out, experts_out, probabilities, weights, slots, rows, tokens, experts, K: tl.constexpr
):
    """Write a routed tile; each chosen expert goes to its slot."""
    ids = tl.arange(0, probabilities.shape[1])[None, :]
    wide = rows.to(tl.int64)[:, None]
    there = (rows < tokens)[:, None]
    tl.store(probabilities_out + wide * experts + ids, probabilities, there & (ids < experts))
    chosen = there & (slots >= 0)
    tl.store(weights_out + wide * K + slots, weights, chosen)
    tl.store(experts_out + wide * K + slots, (slots * 0 + ids).to(tl.int64), chosen)


@triton.jit(do_not_specialize=["tokens", "per_group"])
def router_kernel(
    z,
    condition,
    gate_weight,
    probabilities_out,
    weights_out,
    experts_out,
    ranks,
    counts,
    tokens,
    per_group,
    channels,
    condition_channels,
    experts,
    condition_g,
    condition_d,
    K: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    STEPS: tl.constexpr,
    SORT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Route `STEPS * BM` tokens. SORT: also rank each pair among this program's pairs of its expert, and count them."""
    ids = tl.arange(0, EP)
    running = tl.zeros([EP], tl.int32)
    for step in range(STEPS):
        rows = (tl.program_id(0) * STEPS + step) * BM + tl.arange(0, BM)
        probabilities, weights, slots = route_rows(
            z,
            condition,
            gate_weight,
            rows,
            tokens,
            per_group,
            channels,
            condition_channels,
            experts,
            condition_g,
            condition_d,
            K,
            EP,
            BD,
            DOT,
            PRECISION,
            False,
        )
        store_routing(
            probabilities_out, weights_out, experts_out, probabilities, weights, slots, rows, tokens, experts, K
        )
        if SORT:
            # A token meets an expert at most once: counting tokens above it in the column ranks its pair.
            chosen = (slots >= 0) & (rows < tokens)[:, None]
            hit = chosen.to(tl.int32)
            rank = tl.cumsum(hit, axis=0) - hit + running[None, :]
            tl.store(ranks + rows[:, None] * K + slots, rank, chosen)
            running += tl.sum(hit, axis=0)
    if SORT:
        tl.store(counts + tl.program_id(0) * experts + ids, running, ids < experts)


@triton.jit(do_not_specialize=["pairs", "blocks", "positions"])
def sort_kernel(
    experts_of,
    weights,
    dispatch,
    counts,
    pairs,
    blocks,
    positions,
    experts,
    K: tl.constexpr,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Turn ranks into positions (one program a router block), then fill the padding (one an expert, one the tail)."""
    program = tl.program_id(0)
    ids = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        inside = (block < blocks)[:, None] & (ids < experts)[None, :]
        part = tl.load(counts + block[:, None] * experts + ids[None, :], inside, other=0)
        total += tl.sum(part, axis=0)
        before += tl.sum(tl.where((block < program)[:, None], part, 0), axis=0)
    padded = (total + TILE - 1) // TILE * TILE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    by_pair = dispatch + experts + 1
    by_position = by_pair + pairs
    shares = by_position + positions
    if program < blocks:
        base = starts + before
        for start in range(0, PAIRS, CHUNK):
            pair = program * PAIRS + start + tl.arange(0, CHUNK)
            there = (pair < pairs) & (start + tl.arange(0, CHUNK) < PAIRS)
            expert = tl.load(experts_of + pair, there, other=0).to(tl.int32)
            position = tl.load(by_pair + pair, there, other=0)
            position += tl.sum(tl.where(expert[:, None] == ids[None, :], base[None, :], 0), axis=1)
            tl.store(by_pair + pair, position, there)
            share = tl.load(weights + pair, there, other=0.0)
            tl.store(by_position + position, pair // K, there)
            tl.store(shares + position, share.to(tl.int32, bitcast=True), there)
    else:
        expert = program - blocks
        begin = tl.sum(tl.where(ids == expert, starts, 0))
        first = begin + tl.sum(tl.where(ids == expert, total, 0))
        last = tl.sum(tl.where(ids == expert, ends, 0))
        if expert == 0:
            tl.store(dispatch + ids, starts, ids < experts)
            tl.store(dispatch + experts, tl.sum(padded))
        if expert == experts:
            first = tl.sum(padded)
            begin = first
            last = positions
        for start in range(first, last, CHUNK):
            position = start + tl.arange(0, CHUNK)
            tl.store(by_position + position, position * 0 - 1, position < last)
            tl.store(shares + position, position * 0, position < last)
        for start in range(begin // TILE, last // TILE, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            tl.store(shares + positions + tile, tile * 0 + expert, tile < last // TILE)


@triton.jit
def position_of(by_pair, rows, slot, padded_tokens, there, K: tl.constexpr, DENSE: tl.constexpr):
    """Position of each token's copy: at its chosen expert number `slot`, or in the dense layout at expert `slot`."""
    if DENSE:
        return slot * padded_tokens + rows
    else:
        return tl.load(by_pair + rows * K + slot, there, other=0)


@triton.jit(do_not_specialize=["tokens", "padded_tokens"])
def combine_kernel(
    values,
    dispatch,
    out,
    tokens,
    padded_tokens,
    channels,
    experts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    DENSE: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """`out[token] = sum over its copies of values[position]`, added in the order of the slots."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    there = rows < tokens
    for start in range(0, channels, BD):
        d = start + tl.arange(0, BD)
        inside = there[:, None] & (d < channels)[None, :]
        total = tl.zeros([BM, BD], tl.float32)
        for slot in range(SLOTS):
            position = position_of(dispatch + experts + 1, rows, slot, padded_tokens, there, K, DENSE)
            total += tl.load(values + position.to(tl.int64)[:, None] * channels + d[None, :], inside, other=0.0).to(
                tl.float32
            )
        tl.store(out + rows.to(tl.int64)[:, None] * channels + d[None, :], total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens", "padded_tokens", "blocks"])
def gate_backward_kernel(
    z, gate_weight, probabilities, experts_of, dispatch, copies, share_gradient, weights_upstream,
    probabilities_upstream, z_out, logits_out, gate_parts,
    tokens, padded_tokens, blocks, channels, width, experts,
    K: tl.constexpr, EP: tl.constexpr, EXPERTS: tl.constexpr, DENSE: tl.constexpr, WEIGHTS: tl.constexpr,
    PROBABILITIES: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Gradient of the logits, of z (the experts' copies added up, plus the gate's part) and of the gate, a tile of
    tokens at a time. EXPERTS: whether there are experts at all (`route_topk` has none)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    there = rows < tokens
    ids = tl.arange(0, EP)[None, :]
    inside = there[:, None] & (ids < experts)
    wide = rows.to(tl.int64)
    p = tl.load(probabilities + wide[:, None] * experts + ids, inside, other=0.0)
    chosen = tl.zeros([BM, EP], tl.int32)
    gradient = tl.zeros([BM, EP], tl.float32)
    for slot in tl.static_range(K):
        expert = tl.load(experts_of + wide * K + slot, there, other=-1).to(tl.int32)
        mine = ids == expert[:, None]
        chosen += mine.to(tl.int32)
        value = tl.zeros([BM], tl.float32)
        if WEIGHTS:
            value += tl.load(weights_upstream + wide * K + slot, there, other=0.0)
        if EXPERTS:
            copy = expert if DENSE else slot
            position = position_of(dispatch + experts + 1, rows, copy, padded_tokens, there, K, DENSE)
            parts = share_gradient + position.to(tl.int64)[:, None] * blocks
            for start in range(0, blocks, BLOCKS):
                block = start + tl.arange(0, BLOCKS)[None, :]
                value += tl.sum(tl.load(parts + block, there[:, None] & (block < blocks), other=0.0), axis=1)
        gradient += tl.where(mine, value[:, None], 0.0)
    # weights = kept / sum(kept), kept = the chosen probabilities; then the softmax
    kept = tl.where(chosen > 0, p, 0.0)
    total = tl.sum(kept, axis=1)[:, None]
    total = tl.where(there[:, None], total, 1.0)
    mean = tl.sum(tl.where(chosen > 0, gradient * kept, 0.0), axis=1)[:, None] / total
    slope = tl.where(chosen > 0, (gradient - mean) / total, 0.0)
    if PROBABILITIES:
        slope += tl.load(probabilities_upstream + wide[:, None] * experts + ids, inside, other=0.0)
    slope = p * (slope - tl.sum(tl.where(inside, p * slope, 0.0), axis=1)[:, None])
    slope = tl.where(inside, slope, 0.0)
    tl.store(logits_out + wide[:, None] * experts + ids, slope, inside)

    row_ids = tl.arange(0, EP)[:, None]
    for start in range(0, channels, BD):
        d = start + tl.arange(0, BD)[None, :]
        real = (row_ids < experts) & (d < channels)
        gate = tl.load(gate_weight + row_ids * width + d, real, other=0.0).to(DOT)
        out = tl.dot(slope.to(DOT), gate, input_precision=PRECISION)
        near = there[:, None] & (d < channels)
        if EXPERTS:
            for other in range(0, experts if DENSE else K):
                place = position_of(dispatch + experts + 1, rows, other, padded_tokens, there, K, DENSE)
                out += tl.load(copies + place.to(tl.int64)[:, None] * channels + d, near, other=0.0).to(tl.float32)
        tl.store(z_out + wide[:, None] * channels + d, out.to(z_out.dtype.element_ty), near)
        token = tl.load(z + wide[:, None] * channels + d, near, other=0.0).to(DOT)
        part = tl.dot(tl.trans(slope).to(DOT), token, input_precision=PRECISION)
        slab = tl.program_id(0).to(tl.int64) * experts * channels
        tl.store(gate_parts + slab + row_ids * channels + d, part, real)


@triton.jit(do_not_specialize=["groups", "per_group"])
def condition_backward_kernel(
    condition, gate_weight, logits_gradient, condition_out, gate_parts,
    groups, per_group, condition_channels, width, experts, condition_g, condition_d,
    EP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Gradients of the conditions, each the sum over its group's tokens, and of the gate's columns that meet them."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    there = rows < groups
    ids = tl.arange(0, EP)[None, :]
    slope = tl.zeros([BM, EP], tl.float32)
    first = rows.to(tl.int64)[:, None] * per_group
    for member in range(0, per_group):
        slope += tl.load(
            logits_gradient + (first + member) * experts + ids, there[:, None] & (ids < experts), other=0.0
        )
    row_ids = tl.arange(0, EP)[:, None]
    for start in range(0, condition_channels, BD):
        d = start + tl.arange(0, BD)[None, :]
        real = (row_ids < experts) & (d < condition_channels)
        gate = tl.load(gate_weight + row_ids * width + (width - condition_channels) + d, real, other=0.0).to(DOT)
        near = there[:, None] & (d < condition_channels)
        out = tl.dot(slope.to(DOT), gate, input_precision=PRECISION)
        offset = rows.to(tl.int64)[:, None] * condition_channels + d
        tl.store(condition_out + offset, out.to(condition_out.dtype.element_ty), near)
        source = condition + rows.to(tl.int64)[:, None] * condition_g + d * condition_d
        part = tl.dot(tl.trans(slope).to(DOT), tl.load(source, near, other=0.0).to(DOT), input_precision=PRECISION)
        slab = tl.program_id(0).to(tl.int64) * experts * condition_channels
        tl.store(gate_parts + slab + row_ids * condition_channels + d, part, real)


@triton.jit(do_not_specialize=["token_parts", "condition_parts"])
def gate_sum_kernel(
    from_tokens, from_conditions, out, token_parts, condition_parts, channels, condition_channels, experts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Add the gate's partial gradients in their order: `(E, D)` of the tokens beside `(E, Dc)` of the conditions."""
    width = channels + condition_channels
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = (index // width)[None, :]
    d = (index % width)[None, :]
    there = (index < experts * width)[None, :]
    part = tl.arange(0, PARTS)[:, None]
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for start in range(0, token_parts, PARTS):
        slab = (start + part).to(tl.int64) * experts * channels
        inside = there & (d < channels) & (start + part < token_parts)
        total += tl.load(from_tokens + slab + expert * channels + d, inside, other=0.0)
    for start in range(0, condition_parts, PARTS):
        slab = (start + part).to(tl.int64) * experts * condition_channels
        inside = there & (d >= channels) & (start + part < condition_parts)
        total += tl.load(from_conditions + slab + expert * condition_channels + d - channels, inside, other=0.0)
    tl.store(out + index, tl.sum(total, axis=0).to(out.dtype.element_ty), index < experts * width)
