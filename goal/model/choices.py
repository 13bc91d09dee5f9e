"""Which token may come next (docs/decisions.md 8).

One mask serves sampling, scoring and the reference policy alike, so the ratio of the first update is exactly 1.

A prefix of a greedy decomposition with sum S stands for an interval of amounts [S, S + bound): after the token v at
place i, what remains is less than the gap to the next larger token, else greedy would have taken that one. Keeping to
those bounds makes the sequence of every amount unique; non-increasing tokens follow from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from goal.config import PolicyConfig
from goal.errors import ConfigurationError
from goal.model.tree import TokenTree, with_start
from goal.tokenizer import EOS, PAD, SPECIAL_TOKENS


class ChoiceState(NamedTuple):
    """What the tokens written so far leave open; every field has the shape of the batch."""

    total: torch.Tensor
    """Sum of the values, float64."""
    bound: torch.Tensor
    """What is still to come is less than this, float64."""
    last: torch.Tensor
    """The latest value, float64; infinite at the start."""
    count: torch.Tensor
    """Value tokens written, int64."""
    finished: torch.Tensor
    """Whether EOS was written, bool."""


class Choices(nn.Module):
    """The rules of `PolicyConfig` as masks over the vocabulary."""

    token_values: torch.Tensor
    gaps: torch.Tensor
    allowed: torch.Tensor

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        values = torch.tensor(config.vocabulary, dtype=torch.float64)
        gaps = torch.cat([torch.tensor([torch.inf], dtype=torch.float64), values[:-1] - values[1:]])
        zeros = torch.zeros(SPECIAL_TOKENS, dtype=torch.float64)
        self.register_buffer("token_values", torch.cat([zeros, values]), persistent=False)
        self.register_buffer("gaps", torch.cat([zeros, gaps]), persistent=False)
        allowed = torch.tensor(config.allowed_amounts or (), dtype=torch.float64)
        self.register_buffer("allowed", allowed, persistent=False)
        self.tolerance = 1e-6 * config.vocabulary[-1]
        self.maximum = torch.inf if config.maximum_amount is None else config.maximum_amount + self.tolerance
        self.tree = self._make_tree() if config.allowed_amounts else None
        """All that may be written, where amounts are listed."""

    @property
    def single_step(self) -> bool:
        """Whether every amount is at most one token, so that only the first step decides."""
        return self.tree is not None and self.tree.sequences.shape[1] == 1

    def _make_tree(self) -> TokenTree:
        written = [[*self._write(amount), EOS] for amount in self.config.allowed_amounts or ()]
        longest = max(len(tokens) for tokens in written)
        sequences = torch.tensor([tokens + [PAD] * (longest - len(tokens)) for tokens in written])
        return TokenTree(sequences, self.teacher_forced(with_start(sequences)))

    def _write(self, amount: float) -> list[int]:
        rest, tokens, most = amount, [], self.config.max_length - 1
        for token, value in enumerate(self.config.vocabulary, SPECIAL_TOKENS):
            while rest >= value - self.tolerance:
                rest -= value
                tokens.append(token)
        if abs(rest) > self.tolerance or len(tokens) > most:
            raise ConfigurationError(
                f"allowed_amounts: {amount} cannot be written with {most} of the vocabulary's values; list sums of "
                f"them, or fit the vocabulary with a smaller min_unit"
            )
        return tokens

    def start(self, shape: torch.Size, device: torch.device) -> ChoiceState:
        """Return the state after SOS."""
        infinite = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
        count = torch.zeros(shape, dtype=torch.int64, device=device)
        return ChoiceState(
            torch.zeros_like(infinite), infinite, infinite, count, torch.zeros_like(count, dtype=torch.bool)
        )

    def advance(self, state: ChoiceState, tokens: torch.Tensor) -> ChoiceState:
        """Return the state after one more token of each sequence."""
        value = self.token_values[tokens]
        is_value = tokens >= SPECIAL_TOKENS
        bound = torch.minimum(state.bound - value, self.gaps[tokens])
        return ChoiceState(
            state.total + value,
            torch.where(is_value, bound, state.bound),
            torch.where(is_value, value, state.last),
            state.count + is_value,
            state.finished | (tokens == EOS),
        )

    def mask(self, state: ChoiceState) -> torch.Tensor:
        """Return `(..., V)` bool: the tokens that may come next. After EOS only PAD may."""
        value = self.token_values
        total, bound = state.total[..., None], state.bound[..., None]
        open_ = (state.count < self.config.max_length - 1) & ~state.finished
        mask = open_[..., None] & (total + value <= self.maximum)
        if self.config.canonical:
            mask &= value < bound - self.tolerance
        else:
            mask &= value <= state.last[..., None]
        may_end = ~state.finished
        if len(self.allowed):
            reach = torch.minimum(bound - value, self.gaps)
            first = torch.searchsorted(self.allowed, total + value - self.tolerance)
            mask &= torch.searchsorted(self.allowed, total + value + reach - self.tolerance) > first
            at = torch.searchsorted(self.allowed, state.total - self.tolerance).clamp(max=len(self.allowed) - 1)
            may_end = may_end & ((self.allowed[at] - state.total).abs() <= self.tolerance)
        mask[..., :SPECIAL_TOKENS] = False
        mask[..., EOS] = may_end
        mask[..., PAD] = state.finished
        return mask

    def teacher_forced(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `(..., T, V)` bool: what may follow each prefix of ``tokens`` `(..., T)`, which begins with SOS."""
        state = self.start(tokens.shape[:-1], tokens.device)
        masks = []
        for step in range(tokens.shape[-1]):
            if step:
                state = self.advance(state, tokens[..., step])
            masks.append(self.mask(state))
        return torch.stack(masks, dim=-2)
