"""The state of a decision as the reward model sees it, for every event of a window at once.

An event's state is what happened before it, carried along as averages that fade, beside its own features. Nothing of
the event's incentive or outcome enters, so one pass over a long window gives the state of each of its events, training
reads whole stretches of a user's log instead of one window a decision, and what another amount or another outcome would
have led to is one step on from what is carried (`DecisionState.after`).

Shapes: B windows of L events, S columns of a state, M columns carried.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.functional import silu

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History
from goal.reward.adstock import Adstock

RECALLED = 32
"""Columns of a state for what may matter only later."""


class DecisionState(nn.Module):
    """States of the events of a window.

    Args:
        config: from `state_config`; features, width and window are taken from it.
        scaling: measured on the training rows.
        clock: numeric feature that only tells how much of an episode has passed. It is hidden here: what a user does is
            taken to depend on their history and not on the calendar of the episode, so that states rarely seen late (or
            early) in the log are still understood there. The value towers get it apart.
    """

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling, *, clock: int | None) -> None:
        super().__init__()
        self.past = Adstock(config, scaling)
        self.output = nn.Linear(config.dimension, config.dimension)
        self.unknown = nn.Parameter(torch.zeros(config.dimension))
        """Stands for a past that is not looked at; a new user's is empty, which is another thing."""
        self.clock = clock
        self.register_buffer("uses_history", torch.tensor(config.window > 1))
        self.past_size = config.dimension
        """Leading columns of a state: what tells of the past."""
        self.visible = 2 * config.dimension + config.numeric_features
        """Leading columns, those of the past among them: all that tells of the present response."""
        self.window = config.window
        """Events that a window should hold, the pending one included."""
        recalled = dataclasses.replace(config, dimension=RECALLED)
        self.recall = Adstock(recalled, scaling) if config.window > 1 else None
        self.size = self.visible + (RECALLED if config.window > 1 else 0)
        """Width S of a state."""

    uses_history: torch.Tensor
    """False once the log has shown that past events tell nothing beyond the features; see `PScoreStage.finish`."""

    @property
    def _carriers(self) -> list[Adstock]:
        if not self.uses_history:
            return []
        return [self.past] if self.recall is None else [self.past, self.recall]

    def forward(self, history: History, *, forget: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """States `(B, L, S)`: position t holds the state of event t as if it were pending.

        Args:
            history: B windows.
            forget: `(B,)` bool, windows whose events are encoded without what happened before them; None: none.

        Returns:
            The states, and the mean squared error of what was to be expected of past outcomes (see `Adstock`), which
            has to be learned beside everything else.
        """
        carried, error = self._carry(history)
        return self.of(carried, history.numeric, history.categorical, forget=forget), error

    def pending(self, history: History) -> torch.Tensor:
        """States `(B, S)` of the pending events."""
        rows, last = torch.arange(len(history), device=history.device), history.lengths - 1
        carried = self.carry(history, at=last)
        return self.of(carried, history.numeric[rows, last], history.categorical[rows, last])

    def carry(self, history: History, at: torch.Tensor | None = None) -> torch.Tensor:
        """What each event finds of its past, `(B, L, M)`, or the events at places `(B,)` alone, `(B, M)`.

        M is 0 where the past is not used.
        """
        return self._carry(history, at)[0]

    def _carry(self, history: History, at: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        numeric = self._without_clock(history.numeric)
        parts = [numeric.new_zeros(*(numeric.shape[:2] if at is None else at.shape), 0)]
        total = numeric.new_zeros(())
        for carrier in self._carriers:
            carried, error = carrier.carry(numeric, history, at)
            parts.append(carried)
            total = total + error
        return torch.cat(parts, dim=-1), total

    def after(
        self,
        carried: torch.Tensor,
        numeric: torch.Tensor,
        categorical: torch.Tensor,
        incentives: torch.Tensor,
        outcomes: torch.Tensor,
    ) -> torch.Tensor:
        """What the event after each of B decisions finds of its past, `(B, M)`.

        Args:
            carried: `(B, M)` what the decisions found.
            numeric: `(B, F)` their features.
            categorical: `(B, C)` likewise.
            incentives: `(B,)` what is paid.
            outcomes: `(B, O)` what comes of it: the revenue, then the further objectives.
        """
        event = self._without_clock(numeric), categorical, incentives, outcomes
        parts = carried.split([each.size for each in self._carriers], dim=-1) if self._carriers else ()
        moved = (each.after(part, event) for each, part in zip(self._carriers, parts, strict=True))
        return torch.cat([carried[:, :0], *moved], dim=-1)

    def of(
        self,
        carried: torch.Tensor,
        numeric: torch.Tensor,
        categorical: torch.Tensor,
        *,
        forget: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States `(..., S)` of decisions: what they find of their past `(..., M)`, and their features.

        Columns, in order: what is read of the past, the features as learned, the standardised numbers, the recollection
        (none with a window of 1).
        """
        numeric = self._without_clock(numeric)
        features = self.past.features(numeric, categorical)
        before, recalled = self.unknown.expand_as(features), features.new_zeros(*features.shape[:-1], RECALLED)
        if self.uses_history:
            before = self.past.read(carried[..., : self.past.size])
            if forget is not None:
                before = torch.where(forget[:, None, None], self.unknown, before)
            if self.recall is not None:
                recalled = self.recall.read(carried[..., self.past.size :])
        parts = [before, silu(self.output(features)), self.past.features.scaled(numeric)]
        return torch.cat(parts if self.recall is None else [*parts, recalled], dim=-1)

    def _without_clock(self, numeric: torch.Tensor) -> torch.Tensor:
        if self.clock is not None:
            numeric = numeric.clone()
            numeric[..., self.clock] = torch.nan
        return numeric


def state_config(config: PolicyConfig, dimension: int, *, window: int) -> PolicyConfig:
    """Return the policy's config at another width and with another window."""
    return dataclasses.replace(config, dimension=dimension, heads=1, window=window)
