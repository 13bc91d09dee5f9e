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
from torch.nn.functional import pad, silu

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History
from goal.model.embedding import EventEmbedding

RECALLED = 32
"""Columns of a state for what may matter only later."""
KEPT = (0.0, 0.5, 0.8, 0.93, 0.98)
"""Shares of an average that are left after another event; 0 is the last event alone."""
RECENT = 16
"""Events that are also kept one by one, in a few columns each: what comes a fixed number of steps late."""


Event = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Numeric and categorical features, incentives and outcomes of B events."""


class Stocks(nn.Module):
    """What happened before each event of a window, as averages that fade at several rates ("adstock": Broadbent, "One
    way TV advertisements work", 1979; here of learned features of an event, in two layers) and the last events.

    The second layer averages features of an event beside the averages before it: whether a response was more than was
    to be expected shows only there. Averages are linear in what they average, and one event more is one step on. The
    last events tell what comes a fixed number of steps late. docs/decisions.md has what else was tried.
    """

    kept: torch.Tensor

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling) -> None:
        super().__init__()
        dimension = config.dimension
        self.width = max(1, dimension // 2)
        self.recent = max(1, self.width // 4)
        """Leading features of an event that are kept one by one."""
        averages = self.width * len(KEPT)
        self.parts = (averages, averages, self.recent * RECENT)
        self.size = sum(self.parts)
        """M, the columns carried from event to event."""
        self.embedding = EventEmbedding(config, scaling)
        self.first = nn.Linear(dimension, self.width)
        self.second = nn.Linear(dimension + averages, self.width)
        self.output = nn.Linear(self.size, dimension)
        self.register_buffer("kept", torch.tensor(KEPT), persistent=False)

    def carry(self, numeric: torch.Tensor, history: History, at: torch.Tensor | None = None) -> torch.Tensor:
        """What each event finds, `(B, L, M)`, or the events at places `(B,)` alone, `(B, M)`; at first all is 0."""
        events = self._events(numeric, history.categorical, history.incentives, history.outcomes)
        age = torch.arange(history.window, device=events.device)
        age = age[:, None] - 1 - age
        fading = self.kept[:, None, None] ** age.clamp(min=0) * (1 - self.kept)[:, None, None]
        fading = fading.where(age >= 0, 0)
        features = silu(self.first(events))
        first = torch.einsum("kts,bsw->btkw", fading, features).flatten(2)
        surprises = silu(self.second(torch.cat([events, first], dim=-1)))
        # RECENT zeros before the window; the event itself is not in its own past.
        padded = pad(features[:, :-1, : self.recent], (0, 0, RECENT, 0))
        if at is None:
            second = torch.einsum("kts,bsw->btkw", fading, surprises).flatten(2)
            recent = padded.unfold(1, RECENT, 1).flip(-1).transpose(2, 3).flatten(2)
            return torch.cat([first, second, recent], dim=-1)
        rows = torch.arange(len(history), device=events.device)
        second = (fading[:, at].transpose(0, 1) @ surprises).flatten(1)
        before = at[:, None] + torch.arange(RECENT, device=events.device).flip(0)
        return torch.cat([first[rows, at], second, padded[rows[:, None], before].flatten(1)], dim=-1)

    def after(self, carried: torch.Tensor, event: Event) -> torch.Tensor:
        """What the next event finds `(B, M)`, from what an event found `(B, M)`, was and brought."""
        events = self._events(*event)
        first, second, recent = carried.split(self.parts, dim=-1)
        kept = self.kept[:, None]

        def average(before: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            faded = kept * before.unflatten(-1, (len(KEPT), self.width))
            return (faded + (1 - kept) * features[:, None]).flatten(1)

        features = silu(self.first(events))
        second = average(second, silu(self.second(torch.cat([events, first], dim=-1))))
        recent = torch.cat([features[:, : self.recent], recent[:, : -self.recent]], dim=-1)
        return torch.cat([average(first, features), second, recent], dim=-1)

    def read(self, carried: torch.Tensor) -> torch.Tensor:
        """Carried columns `(..., M)` as `(..., D)`."""
        return silu(self.output(carried))

    def _events(
        self, numeric: torch.Tensor, categorical: torch.Tensor, incentives: torch.Tensor, outcomes: torch.Tensor
    ) -> torch.Tensor:
        return self.embedding.state(numeric, categorical) + self.embedding.past(incentives, outcomes)


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
        self.stocks = Stocks(config, scaling)
        self.output = nn.Linear(2 * config.dimension, config.dimension)
        self.unknown = nn.Parameter(torch.zeros(config.dimension))
        """Stands for a past that is not looked at; a new user's is empty, which is another thing."""
        self.clock = clock
        self.register_buffer("uses_history", torch.tensor(config.window > 1))
        self.visible = config.dimension + config.numeric_features
        """Leading columns of a state: all that tells of the present response."""
        self.window = config.window
        """Events that a window should hold, the pending one included."""
        recalled = dataclasses.replace(config, dimension=RECALLED)
        self.recall = Stocks(recalled, scaling) if config.window > 1 else None
        self.size = self.visible + (RECALLED if config.window > 1 else 0)
        """Width S of a state."""

    uses_history: torch.Tensor
    """False once the log has shown that past events tell nothing beyond the features; see `PScoreStage.finish`."""

    @property
    def _carriers(self) -> list[Stocks]:
        if not self.uses_history:
            return []
        return [self.stocks] if self.recall is None else [self.stocks, self.recall]

    def forward(self, history: History, *, forget: torch.Tensor | None = None) -> torch.Tensor:
        """States `(B, L, S)`: position t holds the state of event t as if it were pending.

        Args:
            history: B windows.
            forget: `(B,)` bool, windows whose events are encoded without what happened before them; None: none.
        """
        return self.of(self.carry(history), history.numeric, history.categorical, forget=forget)

    def pending(self, history: History) -> torch.Tensor:
        """States `(B, S)` of the pending events."""
        rows, last = torch.arange(len(history), device=history.device), history.lengths - 1
        carried = self.carry(history, at=last)
        return self.of(carried, history.numeric[rows, last], history.categorical[rows, last])

    def carry(self, history: History, at: torch.Tensor | None = None) -> torch.Tensor:
        """What each event finds of its past, `(B, L, M)`, or the events at places `(B,)` alone, `(B, M)`.

        M is 0 where the past is not used.
        """
        numeric = self._without_clock(history.numeric)
        nothing = numeric.new_zeros(*(numeric.shape[:2] if at is None else at.shape), 0)
        return torch.cat([nothing, *(each.carry(numeric, history, at) for each in self._carriers)], dim=-1)

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
        """States `(..., S)` of decisions: what they find of their past `(..., M)`, and their features."""
        numeric = self._without_clock(numeric)
        features = self.stocks.embedding.state(numeric, categorical)
        before, recalled = self.unknown.expand_as(features), features.new_zeros(*features.shape[:-1], RECALLED)
        if self.uses_history:
            before = self.stocks.read(carried[..., : self.stocks.size])
            if forget is not None:
                before = torch.where(forget[:, None, None], self.unknown, before)
            if self.recall is not None:
                recalled = self.recall.read(carried[..., self.stocks.size :])
        mixed = silu(self.output(torch.cat([before, features], dim=-1)))
        parts = [mixed, self.stocks.embedding.state.scaled(numeric)]
        return torch.cat(parts if self.recall is None else [*parts, recalled], dim=-1)

    def _without_clock(self, numeric: torch.Tensor) -> torch.Tensor:
        if self.clock is not None:
            numeric = numeric.clone()
            numeric[..., self.clock] = torch.nan
        return numeric


def state_config(config: PolicyConfig, dimension: int, *, window: int) -> PolicyConfig:
    """Return the policy's config at another width and with another window."""
    return dataclasses.replace(config, dimension=dimension, heads=1, window=window)
