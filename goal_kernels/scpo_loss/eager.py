"""SCPO loss in plain torch: the truth the kernel is tested against, and the path of CPU tensors.

Shapes: G sequences, T steps, V vocabulary, P tokens within their sequence's length.
fp16 and bf16 are computed in fp32 inside, fp32 in fp32, fp64 in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from goal_kernels._precision import compute_dtype, without_autocast

# exp(20) = 4.9e8: far beyond any ratio that means something, far below overflow in fp32, also after squaring.
LOG_RATIO_LIMIT = 20.0


class ScpoLoss(NamedTuple):
    """The loss and what a training log wants to see beside it. Every field is a scalar, fp32 (fp64 for fp64 logits).

    Attributes:
        loss: what is minimised: mean over sequences of `-min(ratio*A, clip(ratio)*A) + kl_weight*kl`. The only field
            with a gradient.
        kl: mean over sequences of the KL divergence of the policy from the reference, in nats a sequence.
        clip_fraction: share of sequences (`ratio="token"`: of tokens) whose gradient the clip removed.
        clip_fraction_low: the part of it with a ratio below `1 - clip_low` and a negative advantage.
        clip_fraction_high: the part of it with a ratio above `1 + clip_high` and a positive advantage.
        entropy: mean over tokens of the policy's entropy, in nats.
        ratio_min: the smallest ratio (1 where there is none).
        ratio_max: the largest ratio (1 where there is none).
    """

    loss: Tensor
    kl: Tensor
    clip_fraction: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    entropy: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def scpo_loss(
    logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    old_log_probs: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
    kl: str = "exact",
    ratio: str = "sequence",
) -> ScpoLoss:
    """Eager `goal_kernels.scpo_loss`."""
    with without_autocast(logits.device.type):
        dtype = compute_dtype(logits.dtype)
        sequences, steps, _ = logits.shape
        valid = torch.arange(steps, device=logits.device) < lengths[:, None]
        rows = TokenRows(valid)
        token = rows.take(tokens)[:, None]
        old = rows.take(old_log_probs).detach().to(dtype)
        log_probs = rows.take(logits).to(dtype).log_softmax(dim=-1)
        reference = rows.take(reference_logits).detach().to(dtype).log_softmax(dim=-1)
        probabilities = log_probs.exp()
        chosen = log_probs.gather(-1, token).squeeze(-1)
        if kl == "exact":
            divergence = exact_kl(probabilities, log_probs, reference)
        else:
            divergence = sampled_kl(chosen, reference.gather(-1, token).squeeze(-1))
        step_count = lengths.clamp(0, steps)
        # Per-token values become per-sequence sums only after the padding is gone or zeroed: a mask applied after an
        # exponential would multiply 0 by inf.
        sequence_kl = rows.sum_by_sequence(divergence)
        advantages = advantages.detach().to(dtype)
        log_ratio = chosen - old
        if ratio == "sequence":
            value = rows.sum_by_sequence(log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            gain, low, high = clipped_surrogate(value, advantages, clip_low, clip_high)
            surrogate, counted = gain, torch.ones_like(gain, dtype=torch.bool)
        else:
            value = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            gain, low, high = clipped_surrogate(value, rows.per_token(advantages), clip_low, clip_high)
            surrogate = rows.sum_by_sequence(gain) / step_count.clamp(min=1).to(dtype)
            counted = rows.kept
        loss = (kl_weight * sequence_kl - surrogate).sum() / max(sequences, 1)
        with torch.no_grad():
            units = counted.sum().clamp(min=1)
            low_fraction = (low & counted).sum().to(dtype) / units
            high_fraction = (high & counted).sum().to(dtype) / units
            surprise = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
            entropy = -rows.zero_padding((probabilities * surprise).sum(dim=-1)).sum()
            return ScpoLoss(
                loss=loss,
                kl=sequence_kl.sum() / max(sequences, 1),
                clip_fraction=low_fraction + high_fraction,
                clip_fraction_low=low_fraction,
                clip_fraction_high=high_fraction,
                entropy=entropy / valid.sum().clamp(min=1),
                ratio_min=extreme(value, counted, smallest=True),
                ratio_max=extreme(value, counted, smallest=False),
            )


class TokenRows:
    """The tokens of a batch as rows, without the padding.

    On a CPU the padding is dropped, which with the usual lengths of 1 to 3 out of 8 is most of the work. Dropping
    gives a shape that depends on the data, a synchronisation on an accelerator and a break for torch.compile: there
    every position stays a row and the padding is replaced by zeros before anything is computed from it.

    Attributes:
        kept: `(P,)` bool, rows that are tokens and not padding.
    """

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.drop = valid.device.type == "cpu" and not torch.compiler.is_compiling()
        if self.drop:
            self.index = valid.flatten().nonzero().squeeze(-1)
            self.sequence = self.index // max(valid.shape[1], 1)
            self.kept = torch.ones_like(self.index, dtype=torch.bool)
        else:
            self.kept = valid.flatten()

    def take(self, values: Tensor) -> Tensor:
        """Rows of `values (G, T, ...)`."""
        flat = values.flatten(0, 1)
        if self.drop:
            return flat.index_select(0, self.index)
        return torch.where(self.kept.view(-1, *[1] * (flat.dim() - 1)), flat, 0)

    def per_token(self, values: Tensor) -> Tensor:
        """`values (G,)` repeated for each token of its sequence."""
        if self.drop:
            return values.index_select(0, self.sequence)
        return values.repeat_interleave(self.valid.shape[1], output_size=self.kept.shape[0])

    def zero_padding(self, values: Tensor) -> Tensor:
        """`values (P,)` with zeros where a row is padding."""
        return values if self.drop else torch.where(self.kept, values, 0.0)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sums `(G,)` of `values (P,)`."""
        if self.drop:
            return values.new_zeros(self.valid.shape[0]).index_add(0, self.sequence, values)
        return self.zero_padding(values).view(self.valid.shape).sum(dim=1)


def exact_kl(probabilities: Tensor, log_probs: Tensor, reference: Tensor) -> Tensor:
    """`sum_v p_v (log p_v - log q_v)` of each row; choices masked (-inf) in either have no part in it."""
    supported = (log_probs > -torch.inf) & (reference > -torch.inf)
    difference = torch.where(supported, log_probs - reference, 0.0)
    return (probabilities * difference).sum(dim=-1)


def sampled_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate `exp(d) - d - 1`, `d = log q - log p` of the sampled token, clamped before the exponential.

    Source: http://joschu.net/blog/kl-approx.html.
    """
    supported = (log_probs > -torch.inf) & (reference > -torch.inf)
    difference = torch.where(supported, reference - log_probs, 0.0).clamp(max=LOG_RATIO_LIMIT)
    return difference.expm1() - difference


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`min(ratio*A, clip(ratio)*A)` and where the clip took the gradient away, at the low and at the high end."""
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    bounded = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.where(low | high, bounded, ratio) * advantages, low, high


def extreme(ratio: Tensor, counted: Tensor, *, smallest: bool) -> Tensor:
    """Smallest or largest counted ratio, 1 where nothing counts."""
    if ratio.numel() == 0:
        return ratio.new_ones(())
    if smallest:
        value = torch.where(counted, ratio, torch.inf).amin()
    else:
        value = torch.where(counted, ratio, -torch.inf).amax()
    return torch.where(counted.any(), value, 1.0)
