"""Decisions of the log, and what another amount would have led to.

No simulator is asked: outcomes come from the P-Score, the next event's features from `AmountEffects`.

Shapes: N decisions, B of them, S columns of a state, O outcomes (revenue first).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from goal.errors import ConfigurationError
from goal.log import InteractionLog, Windows
from goal.reward import RewardModel
from goal.training.effects import AmountEffects
from goal.training.pscore import carried_by


def balance(log: InteractionLog, rows: np.ndarray, *, leave_out: int | None = None, cells: int = 20) -> np.ndarray:
    """Weights `(len(rows),)` for drawing decisions: one over the root of how many are alike, float64.

    Alike are those in one cell of numeric features and amount, each cut into ``cells`` equal parts of its range. A
    policy may live where the logged behaviour seldom goes; half-way between the log's own frequencies and a uniform
    cover, both are learned. With many features nearly every decision is alone, and all weigh the same.

    Args:
        log: the log.
        rows: the decisions.
        leave_out: numeric feature that plays no part.
        cells: parts of each range.
    """
    columns = [log.numeric[rows, k] for k in range(log.numeric.shape[1]) if k != leave_out]
    alike = np.zeros(len(rows), dtype=np.int64)
    for column in (*columns, log.incentives[rows]):
        low, high = np.nanquantile(column, [0.001, 0.999]) if np.isfinite(column).any() else (0.0, 0.0)
        place = (column - low) / max(high - low, 1e-12) * cells
        part = np.where(np.isnan(place), cells, np.clip(np.nan_to_num(place), 0, cells - 1)).astype(np.int64)
        alike = np.unique(alike * (cells + 1) + part, return_inverse=True)[1]
    return np.bincount(alike)[alike] ** -0.5


class Transitions:
    """The decisions whose next event is known, and where any amount and outcome would have led from each.

    Without a horizon a user's last event has no successor and is left out: sums bootstrap. With a horizon and no clock
    the logged end of an episode ends it (`going_on` is 0). With a clock the clock ends it; last events are left out.

    Args:
        reward: holds the P-Score, trained, and the clock.
        log: the log.
        rows: training rows, ascending.

    Attributes:
        log: the log.
        rows: `(N,)` of the decisions.
        going_on: `(N,)` float32, 0 where a decision is the last of its episode.

    Raises:
        ConfigurationError: no decision is followed by another.
    """

    def __init__(self, reward: RewardModel, log: InteractionLog, rows: np.ndarray) -> None:
        self.pscore, self.device = reward.pscore.requires_grad_(False).eval(), reward.grid.device
        found = Windows(log, rows, length=1).successors()
        is_last = found.terminal & (reward.clock is None)
        keep = np.flatnonzero((found.index >= 0) | is_last)
        if len(keep) == 0:
            raise ConfigurationError(
                "reward.horizon='long': no decision of the log is followed by another of its user; take 'immediate'"
            )
        self.log, self.rows = log, rows[keep]
        self.going_on = torch.from_numpy(~is_last[keep]).to(torch.float32)
        self._training_rows, self._keep = rows, keep
        self.effects = AmountEffects(log, self.rows, found.row[keep], reward.grid.cpu().double().numpy())
        self._clock = reward.clock
        # by_revenue[first[k] : first[k + 1]] are the decisions that brought revenue of the k-th bin.
        revenue = torch.from_numpy(log.outcomes[self.rows, 0])
        self._by_revenue = revenue.argsort(stable=True)
        bins = self.pscore.bin_of(revenue[self._by_revenue])
        self._first = torch.searchsorted(bins, torch.arange(int(bins[-1]) + 2))

    @cached_property
    def carried(self) -> torch.Tensor:
        """`(N, M)` what the decisions find of their past, in half precision."""
        return carried_by(self.pscore, self.log, self._training_rows)[self._keep]

    @cached_property
    def _cumulative(self) -> torch.Tensor:
        return torch.from_numpy(balance(self.log, self.rows, leave_out=self._clock)).cumsum(0)

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, size: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `(size,)` decisions with replacement, rare ones more often than they occur (see `balance`)."""
        place = torch.rand(size, generator=generator, dtype=torch.float64) * self._cumulative[-1]
        return torch.searchsorted(self._cumulative, place).clamp(max=len(self) - 1)

    @torch.no_grad()
    def states(self, indices: torch.Tensor) -> torch.Tensor:
        """States `(B, S)` of decisions."""
        return self.pscore.state.of(*self._found(indices))

    @torch.no_grad()
    def after(self, indices: torch.Tensor, amounts: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
        """States `(B, S)` of the events after decisions at which amounts `(B,)` bring outcomes `(B, O)`."""
        following = (part.to(self.device) for part in self.effects.next_features(indices, amounts, outcomes))
        event = amounts.to(self.device), outcomes.to(self.device)
        return self.pscore.state.of(self.pscore.state.after(*self._found(indices), *event), *following)

    def outcomes(self, bins: torch.Tensor, luck: torch.Tensor) -> torch.Tensor:
        """Outcomes `(B, O)` of logged decisions whose revenue fell in a bin.

        Args:
            bins: `(B,)` as `PScore.bin_of` counts them.
            luck: `(B,)` in [0, 1), which of the decisions of the bin.
        """
        bins = bins.clamp(max=len(self._first) - 2)
        count = self._first[bins + 1] - self._first[bins]
        place = self._first[bins] + (luck * count).long()
        chosen = self._by_revenue[place.clamp(max=len(self) - 1)]
        return torch.from_numpy(self.log.outcomes[self.rows[chosen.numpy()]])

    def _found(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decisions find: of their past `(B, M)`, and their numeric `(B, F)` and categorical `(B, C)` features."""
        rows = self.rows[indices.numpy()]
        numeric, categorical = torch.from_numpy(self.log.numeric[rows]), torch.from_numpy(self.log.categorical[rows])
        return self.carried[indices].float().to(self.device), numeric.to(self.device), categorical.to(self.device)
