"""The state of a decision as the reward model sees it, for every event of a window at once.

An event's state is what happened before it, summarised by the causal convolution, beside its own features. Nothing of
the event's incentive or outcome enters, so one pass over a long window gives the state of each of its events: training
reads whole stretches of a user's log instead of one window a decision.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.functional import silu

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History
from goal.model.embedding import EventEmbedding
from goal.model.encoder import CausalStates

RECALLED = 32
"""Columns of a state for what may matter only later."""


class DecisionState(nn.Module):
    """States of the events of a window.

    Args:
        config: the policy's shape; features, convolution and width are taken from it.
        scaling: measured on the training rows.
        clock: numeric feature that only tells how much of an episode has passed. It is hidden here: what a user does is
            taken to depend on their history and not on the calendar of the episode, so that states rarely seen late (or
            early) in the log are still understood there. The value towers get it apart.
    """

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling, *, clock: int | None) -> None:
        super().__init__()
        self.embedding = EventEmbedding(config, scaling)
        self.causal = CausalStates(config)
        self.empty = nn.Parameter(torch.zeros(config.dimension))
        self.output = nn.Linear(2 * config.dimension, config.dimension)
        self.clock = clock
        self.register_buffer("uses_history", torch.tensor(config.window > 1))
        self.visible = config.dimension + config.numeric_features
        """Leading columns of a state: all that tells of the present response."""
        reach = 1 + (config.kernel_size - 1) * sum(config.dilations) if config.convolution else 1
        self.context = min(reach, config.window - 1)
        """Past events that reach a state."""
        self.recall = Recall(config, scaling) if self.context else None
        self.size = self.visible + (RECALLED if self.context else 0)
        """Width of a state."""

    uses_history: torch.Tensor
    """False once the log has shown that past events tell nothing beyond the features; see `PScoreStage.finish`."""

    def forward(self, history: History, *, forget: torch.Tensor | None = None) -> torch.Tensor:
        """States `(B, L, size)`: position t holds the state of event t as if it were pending.

        Args:
            history: B windows.
            forget: `(B,)` bool, windows whose events are encoded without what happened before them; None: none.
        """
        numeric = history.numeric
        if self.clock is not None:
            numeric = numeric.clone()
            numeric[..., self.clock] = torch.nan
        features = self.embedding.state(numeric, history.categorical)
        before = self.empty.expand_as(features)
        if self.uses_history:
            past = features + self.embedding.past(history.incentives, history.outcomes)
            before = torch.cat([before[:, :1], self.causal(past)[:, :-1]], dim=1)
            if forget is not None:
                before = torch.where(forget[:, None, None], self.empty, before)
        mixed = silu(self.output(torch.cat([before, features], dim=-1)))
        parts = [mixed, self.embedding.state.scaled(numeric)]
        if self.recall is not None:
            nothing = features.new_zeros(*features.shape[:-1], RECALLED)
            parts.append(self.recall(numeric, history) if self.uses_history else nothing)
        return torch.cat(parts, dim=-1)

    def pending(self, history: History) -> torch.Tensor:
        """States `(B, size)` of the pending events."""
        last = (history.lengths - 1)[:, None, None].expand(-1, 1, self.size)
        return self(history).gather(1, last)[:, 0]


class Recall(nn.Module):
    """What happened before each event and may matter only later, `(B, L, RECALLED)`; an encoder of its own."""

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling) -> None:
        super().__init__()
        config = dataclasses.replace(config, dimension=RECALLED, heads=1)
        self.embedding = EventEmbedding(config, scaling)
        self.causal = CausalStates(config)
        self.empty = nn.Parameter(torch.zeros(RECALLED))

    def forward(self, numeric: torch.Tensor, history: History) -> torch.Tensor:
        """Encode the events before each of a window; ``numeric`` stands in for the window's own."""
        past = self.embedding.state(numeric, history.categorical)
        past = past + self.embedding.past(history.incentives, history.outcomes)
        return torch.cat([self.empty.expand_as(past[:, :1]), self.causal(past)[:, :-1]], dim=1)


def state_config(config: PolicyConfig, dimension: int) -> PolicyConfig:
    """Return the policy's config at another width, with as many dilations as a window of the policy can feed."""
    reach, dilations = 1, []
    for dilation in config.dilations if config.convolution else ():
        reach += (config.kernel_size - 1) * dilation
        if reach <= config.window - 1:
            dilations.append(dilation)
    return dataclasses.replace(
        config,
        dimension=dimension,
        heads=1,
        convolution=bool(dilations),
        dilations=tuple(dilations),
        convolution_activation="linear",
    )
