"""Pretraining: weighted next-token prediction of the logged amounts (paper, L_W-NTP), with teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from goal.config import PretrainingConfig
from goal.log import Windows
from goal.model import Policy
from goal.tokenizer import PAD, IncentiveTokenizer


def weighted_next_token_loss(logits: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor) -> torch.Tensor:
    """Mean over sequences of sum_t omega_t * -log P(g_t), omega = log10(v + 1) + delta; EOS has v = 0, PAD no part.

    Args:
        logits: `(B, T, V)` raw logits; -inf where a choice is forbidden.
        targets: `(B, T)` ids, EOS counted, PAD after it.
        token_weights: `(V,)` omega by token.
    """
    # A bare product would give 0 * inf at PAD; ignored positions are left out instead.
    per_token = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PAD)
    return (per_token * token_weights[targets.flatten()]).sum() / len(targets)


class Pretraining:
    """The stage: draws training windows, and a multiplier from the candidate set where the log has none.

    Decisions whose amount is beyond the policy's maximum teach nothing, nor, where amounts are listed, do those whose
    amount the vocabulary cannot write: their sequence is another amount's.

    Args:
        policy: trained in place.
        windows: training windows.
        tokenizer: of the policy's vocabulary.
        config: the settings.
        multipliers: candidate set (docs/decisions.md 10).
    """

    name = "pretraining"

    def __init__(
        self,
        policy: Policy,
        windows: Windows,
        tokenizer: IncentiveTokenizer,
        config: PretrainingConfig,
        multipliers: tuple[float, ...],
    ) -> None:
        self.module = policy.train()
        self.policy = policy
        self.config = config
        amounts, offered = windows.log.incentives[windows.rows], np.ones(len(windows), dtype=bool)
        if policy.config.allowed_amounts is not None:
            offered &= tokenizer.writes(amounts)
        if policy.config.maximum_amount is not None:
            offered &= amounts <= policy.config.maximum_amount
        if not offered.all():
            windows = Windows(windows.log, windows.rows[offered], length=windows.length)
        self.windows = windows
        self.multipliers = torch.tensor(multipliers)
        self.tokens = tokenizer.encode(windows.log.incentives[windows.rows])
        """Tokens of the pending event of each window, `(n, 1 + T)` from SOS on."""

    def after_step(self) -> None:
        """Nothing follows a step."""

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """One batch, one loss."""
        policy, size = self.policy, self.config.loop.batch_size
        device = policy.token_weights.device
        indices = torch.randint(len(self.windows), (size,), generator=generator)
        history = self.windows.batch(indices).to(device)
        drawn = self.multipliers[torch.randint(len(self.multipliers), (size,), generator=generator)]
        logged = self.windows.targets(indices).multiplier
        multiplier = drawn if logged is None else torch.from_numpy(logged)
        tokens = self.tokens[indices].to(device)
        tokens = tokens[:, : 1 + int((tokens != PAD).sum(dim=1).max())]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        memory = policy.remember(policy.causal_states(history), history.lengths, multiplier.to(device))
        raw = policy.raw_logits(memory, inputs[:, None])[:, 0]
        mask = policy.choices.teacher_forced(inputs)
        # Rounding may set a real-valued amount a hair past a bound; what was logged is never impossible.
        mask = mask.scatter(-1, targets[..., None], True)
        masked = raw.masked_fill(~mask, -torch.inf)
        loss = weighted_next_token_loss(masked, targets, policy.token_weights)
        right = (masked.argmax(dim=-1) == targets) | (targets == PAD)
        yield loss, {"accuracy": right.all(dim=1).float().mean()}
