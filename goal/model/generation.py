"""Writing amounts token by token, with the keys and values of earlier tokens kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax

from goal.model.decoder import Cache, Memory
from goal.tokenizer import PAD, SOS

if TYPE_CHECKING:
    from goal.model.policy import Policy


@dataclass(frozen=True)
class Generation:
    """Amounts as the policy wrote them: B states, m samples each, T tokens; EOS counts, SOS does not.

    Attributes:
        tokens: `(B, m, T)` int64 ids, PAD after EOS.
        lengths: `(B, m)` int64 tokens, EOS counted.
        amounts: `(B, m)` float64, in the incentive's unit.
        log_probs: `(B, m, T)` float32 log-probabilities of the tokens; 0 at PAD.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    amounts: torch.Tensor
    log_probs: torch.Tensor


def pick(logits: torch.Tensor, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """Choose ids `(...)` from logits `(..., V)`; ties go to the lowest id when greedy."""
    if greedy:
        return logits.argmax(dim=-1)
    # Gumbel's trick: one pass, no normalisation, no host sync, and -inf stays impossible.
    uniform = torch.rand(logits.shape, dtype=torch.float64, device=logits.device, generator=generator)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
    return (logits.double() / temperature + gumbel).argmax(dim=-1)


def generate(
    policy: Policy,
    memory: Memory,
    *,
    samples: int,
    greedy: bool,
    temperature: float,
    generator: torch.Generator | None,
) -> Generation:
    """Write ``samples`` amounts for each state of ``memory``; see `Policy.generate`."""
    states = len(memory.condition)
    device = memory.condition.device
    choices, cache = policy.choices, Cache()
    token = torch.full((states, samples), SOS, device=device)
    state = choices.start(token.shape, device)
    tokens, log_probs = [], []
    for step in range(policy.config.max_length):
        mask = choices.mask(state)
        if step and policy.single_step:
            # One choice is left, so the network has no say.
            logits = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        else:
            # Where the first step decides alone, it is asked once for all samples of a state.
            asked = token[:, :1] if policy.single_step else token
            raw, _ = policy.decoder(memory, asked[..., None], start=step, cache=cache)
            logits = policy.read(raw[:, :, 0].expand(-1, samples, -1), mask).float()
        token = pick(logits, greedy=greedy, temperature=temperature, generator=generator)
        chosen = log_softmax(logits, dim=-1).gather(-1, token[..., None])[..., 0]
        tokens.append(token)
        log_probs.append(chosen.masked_fill(token == PAD, 0))
        state = choices.advance(state, token)
        # Asking the device whether all have ended would wait for it; on the CPU the question is free.
        if device.type == "cpu" and bool(state.finished.all()):
            break
    written = torch.stack(tokens, dim=-1)
    return Generation(
        tokens=written,
        lengths=(written != PAD).sum(dim=-1),
        amounts=state.total,
        log_probs=torch.stack(log_probs, dim=-1),
    )
