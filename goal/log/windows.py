"""Windows of a log: an index into its arrays, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from goal.errors import ConfigurationError
from goal.log.history import History
from goal.log.interaction_log import InteractionLog


@dataclass(frozen=True, eq=False)
class Targets:
    """What was done at the pending events of B windows, and what came of it.

    Attributes:
        incentives: `(B,)` float64 amounts.
        revenue: `(B,)` float64.
        cost: `(B,)` float64.
        objectives: `(B, K)` float32.
        multiplier: `(B,)` float32, or None where the log has none.
        propensity: `(B,)` float64, or None where the log has none.
    """

    incentives: np.ndarray
    revenue: np.ndarray
    cost: np.ndarray
    objectives: np.ndarray
    multiplier: np.ndarray | None
    propensity: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Successors:
    """The next event of the same user, for each window.

    Attributes:
        row: `(n,)` int64 row of the log, -1 where the log holds no later event of the user.
        index: `(n,)` int64 window whose pending event that row is, -1 where it is not among these windows. Targets that
            look ahead in a training split must follow ``index``, not ``row``: ``row`` may lie past the split's end.
        terminal: `(n,)` bool, the event ends an episode of the schema's horizon; nothing follows it by definition. A -1
            without it means only that the log stops there.
    """

    row: np.ndarray
    index: np.ndarray
    terminal: np.ndarray


AT_ONCE = 2048
"""Windows that are read at once where all of them are."""


def thinned(rows: np.ndarray, most: int) -> np.ndarray:
    """Return every so many of rows `(n,)`, evenly, so that no more than ``most`` are left."""
    return rows[:: max(1, -(-len(rows) // most))]


class Windows:
    """Lazy windows of ``length`` events, each ending at a pending event of the log.

    The window of a row holds the ``length - 1`` events of the same user before it, fewer at the user's beginning, and
    the row itself as the pending event. Earlier events enter whatever split they belong to: they are in the past.

    Args:
        log: the log; its arrays are indexed, never copied.
        rows: `(n,)` row indices of the pending events, such as one part of ``Splits``.
        length: L, at least 1.

    Raises:
        ConfigurationError: ``length`` or ``rows`` cannot work.
    """

    def __init__(self, log: InteractionLog, rows: np.ndarray, *, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ConfigurationError(f"length: {length!r} came; expected a whole number of events, at least 1")
        rows = np.asarray(rows)
        if rows.ndim != 1 or (len(rows) and not np.issubdtype(rows.dtype, np.integer)):
            raise ConfigurationError(
                f"rows: an array of {rows.dtype} with shape {rows.shape} came; expected a list of row indices"
            )
        if len(rows) and (rows.min() < 0 or rows.max() >= log.events):
            raise ConfigurationError(f"rows: {rows.min()} to {rows.max()} came; the log has rows 0 to {log.events - 1}")
        self.log = log
        self.rows = rows.astype(np.int64, copy=False)
        self.length = int(length)
        self._steps = np.arange(self.length)

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self) -> Sequence[np.ndarray]:
        """Indices of all windows in about equal parts, in order; a single empty one where there is no window."""
        return np.array_split(np.arange(len(self)), max(1, -(-len(self) // AT_ONCE)))

    def batch(self, indices: np.ndarray | torch.Tensor) -> History:
        """Gather windows.

        Args:
            indices: `(B,)` window indices in [0, n).

        Returns:
            B windows of ``length`` events in new memory, on the CPU.
        """
        rows = self.rows[np.asarray(indices)]
        _, position = self.log.locate(rows)
        lengths = np.minimum(position + 1, self.length)
        # Padding points at the pending row, so that every index is valid, and is overwritten below.
        gather = (rows - lengths + 1)[:, None] + self._steps
        np.minimum(gather, rows[:, None], out=gather)
        log = self.log
        padding = np.flatnonzero(self._steps >= lengths[:, None])
        past = self._steps < lengths[:, None] - 1
        numeric = _gather(log.numeric, gather)
        numeric.reshape(gather.size, numeric.shape[2])[padding] = (
            0  # assigned, not multiplied: a missing feature is NaN
        )
        categorical = _gather(log.categorical, gather)
        categorical.reshape(gather.size, categorical.shape[2])[padding] = 0
        incentives = log.incentives.take(gather).astype(np.float32)
        incentives *= past
        outcomes = np.empty((*gather.shape, 1 + log.objectives.shape[1]), dtype=np.float32)
        outcomes[..., 0] = log.revenue.take(gather)
        if log.objectives.shape[1]:
            outcomes[..., 1:] = log.objectives.take(gather, axis=0)
        outcomes *= past[..., None]
        return History(*map(torch.from_numpy, (numeric, categorical, incentives, outcomes, lengths)))

    def targets(self, indices: np.ndarray | torch.Tensor) -> Targets:
        """Gather what was done at the pending events and what came of it; `(B,)` window indices in [0, n)."""
        rows = self.rows[np.asarray(indices)]
        log = self.log
        return Targets(
            incentives=log.incentives[rows],
            revenue=log.revenue[rows],
            cost=log.cost[rows],
            objectives=log.objectives[rows],
            multiplier=None if log.multiplier is None else log.multiplier[rows],
            propensity=None if log.propensity is None else log.propensity[rows],
        )

    def successors(self) -> Successors:
        """Return the next event of the same user for every window."""
        log = self.log
        user, position = log.locate(self.rows)
        following = self.rows + 1
        row = np.where(following < log.offsets[user + 1], following, -1)
        order = self._row_order
        sorted_rows = self.rows if order is None else self.rows[order]
        found = np.searchsorted(sorted_rows, row)
        found = np.minimum(found, len(self.rows) - 1) if len(self.rows) else found
        index = found if order is None else order[found]
        index = np.where((row >= 0) & (self.rows[index] == row), index, -1)
        horizon = log.schema.horizon
        terminal = np.zeros(len(self.rows), dtype=bool) if horizon is None else position + 1 == horizon
        return Successors(row=row, index=index, terminal=terminal)

    @cached_property
    def _row_order(self) -> np.ndarray | None:
        return None if (np.diff(self.rows) > 0).all() else np.argsort(self.rows, kind="stable")


def _gather(matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``matrix[rows]`` along the first axis; a matrix without columns costs no gather."""
    if matrix.shape[1] == 0:
        return np.empty((*rows.shape, 0), dtype=matrix.dtype)
    return matrix.take(rows, axis=0)
