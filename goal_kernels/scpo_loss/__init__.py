"""The SCPO objective (Algorithm 3 of the paper) and what a training log shows beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from goal_kernels._checks import (
    INTEGER,
    check_choice,
    check_integer,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    debugging,
)
from goal_kernels.backend import backend_for, fall_back
from goal_kernels.scpo_loss import eager
from goal_kernels.scpo_loss.eager import ScpoLoss

__all__ = ["ScpoLoss", "scpo_loss"]


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
    """`mean_g of -min(ratio*A, clip(ratio, 1 - clip_low, 1 + clip_high)*A) + kl_weight*kl`, to be minimised.

    Legend: G sequences, T steps, V vocabulary. Only steps before a sequence's length count, EOS among them; what
    `logits`, `tokens` and `old_log_probs` hold behind it is never read, NaN included. Logits of -inf (masked choices)
    are legal: probability 0, no part in the KL, whichever of the two policies masks them.

    Args:
        logits: `(G, T, V)`, the policy at each prefix; the only argument that gets a gradient.
        reference_logits: `(G, T, V)`, the reference policy at the same prefixes.
        tokens: `(G, T)` int64 or int32, the sampled ids, EOS included and SOS not.
        old_log_probs: `(G, T)`, log-probability of each token when it was sampled.
        lengths: `(G,)` int64 or int32, tokens of each sequence, between 0 and T.
        advantages: `(G,)`.
        clip_low, clip_high: the ratio is clipped to `[1 - clip_low, 1 + clip_high]`.
        kl_weight: weight of the KL divergence, nats a sequence; 0 leaves it out of the loss and still reports it.
        kl: of a sequence, the sum over its tokens of KL(policy || reference) at that prefix: `"exact"` over the
            vocabulary or `"k3"`, the estimate from the sampled token.
        ratio: `"sequence"`: one ratio, `exp(sum of log-prob differences)`; `"token"`: one ratio a token, the surrogate
            being the mean over the sequence's tokens. Log-ratios are held within +-20 before the exponential.

    Returns:
        `ScpoLoss`: scalars; only `loss` has a gradient.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not fit together, a length or token is out of range (tested on CPU tensors
            only: on a GPU it would cost a synchronisation), or an option is unknown. With `GOAL_KERNELS_DEBUG=1` in
            the environment also where the logits of a token are NaN, +inf or all -inf.

    Source: SCPO objective and Algorithm 3 of the paper, which maximise; k3 from http://joschu.net/blog/kl-approx.html.
    """
    for argument, value in (
        ("logits", logits),
        ("reference_logits", reference_logits),
        ("old_log_probs", old_log_probs),
        ("advantages", advantages),
    ):
        check_tensor(argument, value)
    check_tensor("tokens", tokens, dtypes=INTEGER)
    check_tensor("lengths", lengths, dtypes=INTEGER)
    check_shape("logits", logits, (None, None, None), "(G, T, V)")
    sequences, steps, vocabulary = logits.shape
    check_integer("V, the last axis of logits", vocabulary, minimum=1)
    check_shape("reference_logits", reference_logits, tuple(logits.shape), "(G, T, V)")
    check_shape("tokens", tokens, (sequences, steps), "(G, T)")
    check_shape("old_log_probs", old_log_probs, (sequences, steps), "(G, T)")
    check_shape("lengths", lengths, (sequences,), "(G,)")
    check_shape("advantages", advantages, (sequences,), "(G,)")
    check_same_device(
        "logits",
        logits,
        reference_logits=reference_logits,
        tokens=tokens,
        old_log_probs=old_log_probs,
        lengths=lengths,
        advantages=advantages,
    )
    check_number("clip_low", clip_low, minimum=0.0)
    check_number("clip_high", clip_high, minimum=0.0)
    check_number("kl_weight", kl_weight, minimum=0.0)
    check_choice("kl", kl, ("exact", "k3"))
    check_choice("ratio", ratio, ("sequence", "token"))
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(tokens, lengths, vocabulary)
    if debugging():
        _check_logits("logits", logits, lengths)
        _check_logits("reference_logits", reference_logits, lengths)
    implementation = eager.scpo_loss
    if backend_for(logits) == "triton":
        from goal_kernels.scpo_loss import triton as kernels

        if kernels.supports(logits):
            implementation = kernels.scpo_loss
        else:
            fall_back("scpo_loss", kernels.LIMITS)
    return implementation(
        logits,
        reference_logits,
        tokens,
        old_log_probs,
        lengths,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_weight=kl_weight,
        kl=kl,
        ratio=ratio,
    )


def _check_values(tokens: Tensor, lengths: Tensor, vocabulary: int) -> None:
    """Lengths and the tokens before them are in range."""
    steps = tokens.shape[1]
    outside = (lengths < 0) | (lengths > steps)
    if outside.any():
        raise ValueError(f"lengths holds {int(lengths[outside][0])}; expected values between 0 and T = {steps}")
    valid = torch.arange(steps) < lengths[:, None]
    outside = valid & ((tokens < 0) | (tokens >= vocabulary))
    if outside.any():
        raise ValueError(
            f"tokens holds {int(tokens[outside][0])} before the end of a sequence; expected ids between 0 and "
            f"{vocabulary - 1}, the last of V = {vocabulary} logits"
        )


def _check_logits(argument: str, logits: Tensor, lengths: Tensor) -> None:
    """Every token before the end of its sequence has a distribution."""
    valid = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]
    top = logits.detach().float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(dim=-1)
    lost = valid & top.isinf()
    if lost.any():
        sequence, step = lost.nonzero()[0].tolist()
        raise ValueError(
            f"{argument} gives {int(lost.sum())} tokens no distribution, first step {step} of sequence {sequence}: "
            f"expected no NaN, no +inf and at least one choice above -inf"
        )
