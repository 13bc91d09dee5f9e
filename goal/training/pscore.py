"""Training of the P-Score on the training rows of the log, and whether it needs the past.

Shapes: B decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from goal.config import RewardConfig
from goal.log import History, InteractionLog, Windows
from goal.reward import PScore
from goal.reward.pscore import COST, LATER, REVENUE, SURPRISE

SEGMENT = 64
"""Decisions learned from in one stretch of a user's log."""
CONTEXT = 16
"""Events before a stretch that are read along with it."""
HALF_MAX = torch.finfo(torch.float16).max
HELD_OUT = 20
"""One user in this many is kept back, to tell whether the past helps to predict."""
FEWEST = 5
"""Users that are kept back at least; where that would be more than half of them, none is."""
GROUPS = 50
"""Groups of kept-back users whose losses are compared, at most."""
AT_ONCE = 64
"""Kept-back stretches that are read at once."""
FORGETTING = 0.5
"""Share of stretches that the P-Score learns from without their past."""
EVIDENCE = 3.0
"""Standard errors by which the past must lower the held-out loss to be used."""


class Segments:
    """Stretches of the log in which every training row occurs once, each with the events before it that it needs.

    Args:
        log: the log.
        rows: training rows, ascending.
        context: past events that reach a state.
    """

    def __init__(self, log: InteractionLog, rows: np.ndarray, *, context: int) -> None:
        user = log.user_index[rows]
        first_of_run = np.flatnonzero(np.r_[True, (np.diff(rows) != 1) | (np.diff(user) != 0)])
        run = np.repeat(first_of_run, np.diff(np.r_[first_of_run, len(rows)]))
        place = np.arange(len(rows)) - run
        is_end = np.r_[(place[1:] % SEGMENT == 0), True]
        ends = np.flatnonzero(is_end)
        self.counts = torch.from_numpy(np.diff(np.r_[-1, ends]))
        """Decisions of each segment: its last `counts` events."""
        self.windows = Windows(log, rows[ends], length=context + SEGMENT)

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, History]:
        """Return `(P,)` flat positions of the decisions in the windows, their `(P,)` rows, and the windows."""
        history = self.windows.batch(indices)
        place = torch.arange(history.window)
        lengths = history.lengths[:, None]
        inside = (place < lengths) & (place >= lengths - self.counts[indices][:, None])
        rows = torch.from_numpy(self.windows.rows)[indices][:, None] - lengths + 1 + place
        return inside.flatten().nonzero()[:, 0], rows[inside], history


def context_of(pscore: PScore) -> int:
    """Events to read before a stretch."""
    return min(CONTEXT, pscore.state.window - 1)


def labels_of(log: InteractionLog, rows: torch.Tensor, pscore: PScore) -> dict[str, torch.Tensor]:
    """Outcomes `(B,)` of rows by objective, in their own units."""
    index = rows.numpy()
    columns = {REVENUE: log.revenue[index], COST: log.cost[index]}
    for k, objective in enumerate(log.schema.objectives):
        columns[objective.name] = log.objectives[index, k]
    return {name: torch.from_numpy(columns[name]).to(torch.float32) for name in pscore.kinds}


class PScoreStage:
    """Fits the P-Score to the training rows, with and without the past of each decision.

    A policy brings about pasts that no logged behaviour shows, and a network that reads them extrapolates. So the past
    is used only if it lowers the loss on users that were kept back; see `finish`.
    """

    name = "pscore"

    def __init__(self, pscore: PScore, log: InteractionLog, rows: np.ndarray, config: RewardConfig) -> None:
        self.module = pscore.train()
        self.pscore = pscore
        self.log = log
        self.segments = Segments(log, rows, context=context_of(pscore))
        users = np.unique(log.user_index[self.segments.windows.rows], return_inverse=True)[1]
        every = min(HELD_OUT, (int(users[-1]) + 1) // FEWEST)
        is_held_out = users % every == every - 1 if every > 1 else np.zeros(len(users), dtype=np.bool_)
        has_past = log.locate(self.segments.windows.rows)[1] > 0
        tells = is_held_out & has_past
        self.learned, self.held_out = (torch.from_numpy(np.flatnonzero(part)) for part in (~is_held_out, tells))
        self._held_out_users = torch.from_numpy(np.unique(users[tells], return_inverse=True)[1])
        """Of each kept-back stretch, counted from 0 on."""
        self.per_batch = max(1, round(config.pscore.batch_size * len(self.segments) / len(rows)))

    def after_step(self) -> None:
        """Nothing follows a step."""

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """One batch of segments, one loss."""
        indices = self.learned[torch.randint(len(self.learned), (self.per_batch,), generator=generator)]
        losses = self._losses(indices, torch.rand(len(indices), generator=generator) < FORGETTING, learning=True)
        yield self.pscore.weigh(losses), {f"loss_{name}": value.detach() for name, value in losses.items()}

    def _losses(self, indices: torch.Tensor, forget: torch.Tensor, *, learning: bool) -> dict[str, torch.Tensor]:
        device = self.pscore.scales.device
        positions, rows, history = self.segments.batch(indices)
        history = history.to(device)
        every, surprise = self.pscore.state(history, forget=forget.to(device))
        states = every.flatten(0, 1)[positions.to(device)]
        amounts = torch.from_numpy(self.log.incentives[rows.numpy()]).to(device, torch.float32)
        labels = {name: label.to(device) for name, label in labels_of(self.log, rows, self.pscore).items()}
        losses = self.pscore.losses(states, amounts, labels)
        if learning and self.pscore.later is not None:
            losses |= {LATER: self.pscore.later_loss(history, every), SURPRISE: surprise}
        return losses

    @torch.no_grad()
    def finish(self) -> float:
        """Leave the past out unless the kept-back users speak for it.

        Returns:
            How many standard errors the past lowers their loss by; NaN where too few users
            with a past were kept back.
        """
        evidence = math.nan
        users = int(self._held_out_users.max()) + 1 if len(self.held_out) else 0
        if users >= FEWEST:
            # Users differ and decisions of one are alike: only whole users tell how sure a mean is.
            group = self._held_out_users * min(GROUPS, users) // users
            gain = torch.stack([self._gain(self.held_out[group == each]) for each in range(int(group[-1]) + 1)])
            evidence = float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12))
        self.pscore.state.uses_history.fill_(evidence > EVIDENCE and self.pscore.state.window > 1)
        return evidence

    def _gain(self, segments: torch.Tensor) -> torch.Tensor:
        """By how much the past lowers the mean loss of stretches."""
        total = torch.zeros((), dtype=torch.float64)
        for indices in segments.split(AT_ONCE):
            with_past, without = (
                self.pscore.weigh(self._losses(indices, torch.full(indices.shape, forget), learning=False))
                for forget in (False, True)
            )
            total += self.segments.counts[indices].sum() * (without - with_past).double().cpu()
        return total / self.segments.counts[segments].sum()


@torch.no_grad()
def carried_by(pscore: PScore, log: InteractionLog, rows: np.ndarray) -> torch.Tensor:
    """What training rows find of their past, `(len(rows), M)` in half precision, by whole stretches of the log."""
    segments = Segments(log, rows, context=context_of(pscore))
    device, carried = pscore.scales.device, None
    place_of_row = torch.full((log.events,), -1, dtype=torch.int64)
    place_of_row[torch.from_numpy(rows)] = torch.arange(len(rows))
    for indices in torch.arange(len(segments)).split(256):
        positions, found, history = segments.batch(indices)
        part = pscore.state.carry(history.to(device)).flatten(0, 1)
        if carried is None:
            carried = torch.empty(len(rows), part.shape[1], dtype=torch.float16)
        carried[place_of_row[found]] = part[positions.to(device)].cpu().clamp(-HALF_MAX, HALF_MAX).half()
    assert carried is not None
    return carried
