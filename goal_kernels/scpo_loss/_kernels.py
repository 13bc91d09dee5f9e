"""The kernels of the SCPO loss: loss and gradient of whole sequences, the sums over programs, and a scaling."""

from __future__ import annotations

import triton
import triton.language as tl

from goal_kernels.scpo_loss.eager import LOG_RATIO_LIMIT

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
# Partials of one program: loss, KL, clipped low, clipped high, entropy, tokens, smallest ratio, largest ratio
PARTIALS = tl.constexpr(8)


@triton.jit
def scpo_rows(logits):
    """Log-softmax of `[S, T, V]` rows: probabilities, log-probabilities with 0 where masked, that mask, and the lse."""
    x = logits.to(tl.float32)
    top = tl.max(x, axis=2)
    shifted = x - top[:, :, None]
    weight = tl.exp(shifted)
    total = tl.sum(weight, axis=2)
    log_total = tl.log(total)
    masked = x == float("-inf")
    log_probs = tl.where(masked, 0.0, shifted - log_total[:, :, None])
    return weight * (1.0 / total)[:, :, None], log_probs, masked, top + log_total


@triton.jit(do_not_specialize=["sequences", "programs"])
def scpo_loss_kernel(
    logits,
    reference,
    tokens,
    old_log_probs,
    lengths,
    advantages,
    gradient,
    partials,
    sequences,
    programs,
    steps,
    vocabulary,
    logits_g,
    logits_t,
    logits_v,
    reference_g,
    reference_t,
    reference_v,
    clip_low,
    clip_high,
    kl_weight,
    scale,
    EXACT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
):
    s = tl.arange(0, S)
    t = tl.arange(0, T)
    v = tl.arange(0, V)
    losses = tl.zeros([S], tl.float32)
    divergences = tl.zeros([S], tl.float32)
    entropies = tl.zeros([S], tl.float32)
    counts = tl.zeros([S], tl.float32)
    lows = tl.zeros([S], tl.float32)
    highs = tl.zeros([S], tl.float32)
    smallest = tl.full([S], float("inf"), tl.float32)
    largest = tl.full([S], float("-inf"), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * S, sequences, programs * S):
        # Every load comes before the arithmetic: reductions hold up what is behind them.
        there = s < sequences - first
        length = tl.load(lengths + first + s, there, other=0).to(tl.int32)
        length = tl.minimum(tl.maximum(length, 0), steps)
        # Padding is masked here, before any exponential, and never read.
        valid = t[None, :] < length[:, None]
        place = s[:, None] * steps + t[None, :]
        token = tl.load(tokens + first * steps + place, valid, other=0).to(tl.int32)
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        g = (s.to(tl.int64) + first)[:, None]
        row = g * logits_g + t[None, :].to(tl.int64) * logits_t
        reference_row = g * reference_g + t[None, :].to(tl.int64) * reference_t
        inside = valid[:, :, None] & (v < vocabulary)[None, None, :]
        # Rows of padding become even distributions, whose numbers are finite and then dropped.
        filler = tl.where(v < vocabulary, 0.0, float("-inf"))[None, None, :]
        x = tl.load(logits + row[:, :, None] + v[None, None, :] * logits_v, inside, other=filler)
        y = tl.load(reference + reference_row[:, :, None] + v[None, None, :] * reference_v, inside, other=filler)
        chosen = tl.load(logits + row + token.to(tl.int64) * logits_v, valid, other=0.0).to(tl.float32)
        if not EXACT:
            reference_token = reference + reference_row + token.to(tl.int64) * reference_v
            wanted = tl.load(reference_token, valid, other=0.0).to(tl.float32)
        old = tl.load(old_log_probs + first * steps + place, valid, other=0.0).to(tl.float32)
        advantage = tl.load(advantages + first + s, there, other=0.0).to(tl.float32)

        p, log_p, masked, lse = scpo_rows(x)
        _, log_q, reference_masked, reference_lse = scpo_rows(y)
        chosen -= lse
        entropy = -tl.sum(p * log_p, axis=2)
        if EXACT:
            supported = ~masked & ~reference_masked
            difference = tl.where(supported, log_p - log_q, 0.0)
            kl = tl.sum(p * difference, axis=2)
        else:
            wanted -= reference_lse
            estimable = (chosen > float("-inf")) & (wanted > float("-inf"))
            gap = tl.where(estimable, wanted - chosen, 0.0)
            kl_moves = estimable & (gap <= LIMIT)
            gap = tl.minimum(gap, LIMIT)
            # exp(d) - d - 1 loses all digits near 0, where its series is exact
            near = gap * gap * (0.5 + gap * (1.0 / 6.0 + gap * (1.0 / 24.0 + gap * (1.0 / 120.0))))
            kl = tl.where(tl.abs(gap) < 0.1, near, tl.exp(gap) - gap - 1.0)
        kl = tl.where(valid, kl, 0.0)
        kl_sequence = tl.sum(kl, axis=1)

        log_ratio = tl.where(valid, chosen - old, 0.0)
        steps_float = tl.maximum(length, 1).to(tl.float32)
        if PER_TOKEN:
            bounded = tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT)
            ratio = tl.exp(tl.where(log_ratio == log_ratio, bounded, log_ratio))  # min and max drop NaN
            low = valid & (ratio < 1.0 - clip_low) & (advantage < 0.0)[:, None]
            high = valid & (ratio > 1.0 + clip_high) & (advantage > 0.0)[:, None]
            clipped = tl.where(low, 1.0 - clip_low, tl.where(high, 1.0 + clip_high, ratio))
            gain = tl.sum(tl.where(valid, clipped * advantage[:, None], 0.0), axis=1) / steps_float
            moves = ~low & ~high & (tl.abs(log_ratio) <= LIMIT)
            pull = tl.where(moves, ratio * (advantage / steps_float)[:, None], 0.0)
            lows += tl.sum(low.to(tl.float32), axis=1)
            highs += tl.sum(high.to(tl.float32), axis=1)
            smallest = tl.minimum(smallest, tl.min(tl.where(valid, ratio, float("inf")), axis=1))
            largest = tl.maximum(largest, tl.max(tl.where(valid, ratio, float("-inf")), axis=1))
        else:
            log_ratio_sequence = tl.sum(log_ratio, axis=1)
            bounded = tl.minimum(tl.maximum(log_ratio_sequence, -LIMIT), LIMIT)
            bounded = tl.where(log_ratio_sequence == log_ratio_sequence, bounded, log_ratio_sequence)
            ratio = tl.exp(bounded)  # NaN put back: min and max drop it
            low = there & (ratio < 1.0 - clip_low) & (advantage < 0.0)
            high = there & (ratio > 1.0 + clip_high) & (advantage > 0.0)
            clipped = tl.where(low, 1.0 - clip_low, tl.where(high, 1.0 + clip_high, ratio))
            gain = clipped * advantage
            moves = ~low & ~high & (tl.abs(log_ratio_sequence) <= LIMIT)
            pull = tl.where(moves, ratio * advantage, 0.0)[:, None]
            lows += low.to(tl.float32)
            highs += high.to(tl.float32)
            smallest = tl.minimum(smallest, tl.where(there, ratio, float("inf")))
            largest = tl.maximum(largest, tl.where(there, ratio, float("-inf")))
        losses += tl.where(there, kl_weight * kl_sequence - gain, 0.0)
        divergences += kl_sequence
        entropies += tl.sum(tl.where(valid, entropy, 0.0), axis=1)
        counts += length.to(tl.float32)

        if GRADIENT:
            push = -pull
            if not EXACT:
                push += tl.where(kl_moves, kl_weight * (1.0 - tl.exp(gap)), 0.0)
            push = tl.where(valid, push * scale, 0.0)
            hit = (v[None, None, :] == token[:, :, None]).to(tl.float32)
            slope = push[:, :, None] * (hit - p)
            if EXACT:
                # Where the reference masks what the policy allows, the supported p do not sum to one: hence their sum.
                held = tl.where(supported, 1.0, 0.0)
                shift = (kl + tl.sum(p * held, axis=2))[:, :, None]
                slope += (kl_weight * scale) * p * (difference + held - shift)
            out = gradient + first * steps * vocabulary + (place[:, :, None] * vocabulary + v[None, None, :])
            within = (there[:, None] & (t < steps)[None, :])[:, :, None] & (v < vocabulary)[None, None, :]
            tl.store(out, tl.where(inside, slope, 0.0).to(gradient.dtype.element_ty), within)

    mine = partials + tl.program_id(0) * PARTIALS
    tl.store(mine, tl.sum(losses, axis=0))
    tl.store(mine + 1, tl.sum(divergences, axis=0))
    tl.store(mine + 2, tl.sum(lows, axis=0))
    tl.store(mine + 3, tl.sum(highs, axis=0))
    tl.store(mine + 4, tl.sum(entropies, axis=0))
    tl.store(mine + 5, tl.sum(counts, axis=0))
    tl.store(mine + 6, tl.min(smallest, axis=0))
    tl.store(mine + 7, tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["programs", "sequences"])
def scpo_summary_kernel(partials, loss, statistics, programs, sequences, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partials in their order. `statistics` follows the fields of `ScpoLoss` after the loss."""
    program = tl.arange(0, BLOCK)
    field = tl.arange(0, PARTIALS)[None, :]
    sums = tl.zeros([BLOCK, PARTIALS], tl.float32)
    smallest = tl.full([BLOCK, PARTIALS], float("inf"), tl.float32)
    largest = tl.full([BLOCK, PARTIALS], float("-inf"), tl.float32)
    for start in range(0, programs, BLOCK):
        there = (start + program < programs)[:, None]
        part = tl.load(partials + (start + program)[:, None] * PARTIALS + field, there, other=0.0)
        sums += tl.where(field < 6, part, 0.0)
        smallest = tl.where(there & (field == 6), tl.minimum(smallest, part), smallest)
        largest = tl.where(there & (field == 7), tl.maximum(largest, part), largest)
    total = tl.sum(sums, axis=0)[None, :]
    count = tl.maximum(sequences, 1).to(tl.float32)
    tokens = tl.sum(tl.where(field == 5, total, 0.0))
    units = tl.maximum(tokens, 1.0) if PER_TOKEN else count
    low = tl.sum(tl.where(field == 2, total, 0.0)) / units
    high = tl.sum(tl.where(field == 3, total, 0.0)) / units
    least = tl.min(smallest)
    most = tl.max(largest)
    tl.store(loss, tl.sum(tl.where(field == 0, total, 0.0)) / count)
    tl.store(statistics, tl.sum(tl.where(field == 1, total, 0.0)) / count)
    tl.store(statistics + 1, low + high)
    tl.store(statistics + 2, low)
    tl.store(statistics + 3, high)
    tl.store(statistics + 4, tl.sum(tl.where(field == 4, total, 0.0)) / tl.maximum(tokens, 1.0))
    tl.store(statistics + 5, tl.where(least == float("inf"), 1.0, least))
    tl.store(statistics + 6, tl.where(most == float("-inf"), 1.0, most))


@triton.jit(do_not_specialize=["elements"])
def scale_kernel(gradient, upstream, factor, elements, BLOCK: tl.constexpr):
    """Multiply in place by `upstream * factor`; nothing is read or written where that is 1, the usual case."""
    scale = tl.load(upstream).to(tl.float32) * factor
    if scale != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, elements, step):
            offset = tl.arange(0, BLOCK)
            inside = offset < elements - first
            values = tl.load(gradient + first + offset, inside, other=0.0).to(tl.float32)
            tl.store(gradient + first + offset, (values * scale).to(gradient.dtype.element_ty), inside)
