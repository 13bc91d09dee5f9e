"""What the amount of one event and what it brought do to the features of the next.

Shapes: N decisions, F numeric features, C categorical features, O outcomes (revenue first), B of the decisions.
"""

from __future__ import annotations

import numpy as np
import torch

from goal.log import InteractionLog, thinned

MOST_ROWS = 200_000
"""Decisions that the regression reads, at most."""


class AmountEffects:
    """Next features had another amount been paid and other outcomes come in: the logged ones, moved by average effects.

    Each next feature is regressed on the present ones (linear and squared), the amount (any function of it that is
    linear between the amounts of a grid), the amount times
    each feature, each outcome and whether it is above 0; what the regression leaves over stays as it was logged
    (additive noise; Lu et al., "Sample-efficient reinforcement learning via counterfactual-based data augmentation",
    2020). Moved features stay within the range of the logged ones, missing ones stay missing, categorical ones stay as
    they are. Where no decision is followed by another, effects are 0. The effect is causal as far as the features hold
    whatever the amounts were chosen by.

    Args:
        log: the log.
        rows: `(N,)` decisions.
        next_rows: `(N,)` the event that follows each, or -1 where none does.
        grid: `(G,)` amounts, ascending.
    """

    def __init__(self, log: InteractionLog, rows: np.ndarray, next_rows: np.ndarray, grid: np.ndarray) -> None:
        self.log, self.rows, self.next_rows, self.grid = log, rows, next_rows, grid
        followed = np.flatnonzero(next_rows >= 0)
        sample = thinned(followed, MOST_ROWS)
        present, following = log.numeric[rows[sample]], log.numeric[next_rows[sample]].astype(np.float64)
        amounts = log.incentives[rows[sample]]
        brought = log.outcomes[rows[sample]]
        self.effect = np.zeros((len(grid) - 1 + present.shape[1] + 2 * brought.shape[1], present.shape[1]))
        """What each feature of amount and outcomes adds to each next feature, `(G - 1 + F + 2 O, F)`."""
        self.persistence = np.zeros((2 * present.shape[1], present.shape[1]))
        """What is left of present features, linear and squared, in each next one, `(2 F, F)`."""
        if len(sample) == 0:
            self._scale, self._outcome_scale = 1.0, np.ones(brought.shape[1])
            self._centre, self._spread = np.zeros(present.shape[1]), np.ones(present.shape[1])
            self._low = self._high = np.full(present.shape[1], np.nan)
            return
        self._scale = max(float(amounts.mean()), 1e-12)
        self._outcome_scale = np.maximum(np.abs(brought).mean(axis=0), 1e-12)
        known = np.where(np.isfinite(present), present, np.nan)
        some = np.isfinite(present).any(axis=0)
        columns = np.where(some, known, 0.0)
        self._centre, self._spread = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0) + 1e-12
        self._low, self._high = np.nanmin(columns, axis=0), np.nanmax(columns, axis=0)
        state, done = self._features_of_state(present), self._features_of_event(present, amounts, brought)
        design = np.concatenate([np.ones((len(sample), 1)), state, done], axis=1)
        for feature, column in enumerate(following.T):
            there = np.isfinite(column)
            if there.sum() > 2 * design.shape[1]:
                weights = np.linalg.lstsq(design[there], column[there], rcond=None)[0]
                self.effect[:, feature] = weights[-done.shape[1] :]
                self.persistence[:, feature] = weights[1 : -done.shape[1]]

    def next_features(
        self,
        indices: torch.Tensor,
        amounts: torch.Tensor,
        outcomes: torch.Tensor,
        *,
        present: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numeric `(B, F)` and categorical `(B, C)` features of the event after each decision.

        Args:
            indices: `(B,)` of the decisions, in [0, N).
            amounts: `(B,)` that are paid instead of the logged ones.
            outcomes: `(B, O)` that come in instead of the logged ones.
            present: `(B, F)` numeric features that the decisions have instead of the logged ones, if they do.
        """
        rows, next_rows = self.rows[indices.numpy()], self.next_rows[indices.numpy()]
        logged, following = self.log.numeric[rows], self.log.numeric[next_rows]
        had = logged if present is None else present.numpy()
        change = self._features_of_event(had, amounts.numpy(), outcomes.numpy())
        change -= self._features_of_event(logged, self.log.incentives[rows], self.log.outcomes[rows])
        moved = change @ self.effect
        if present is not None:
            moved += (self._features_of_state(had) - self._features_of_state(logged)) @ self.persistence
        moved = following + moved.astype(np.float32)
        # What was logged may lie outside the sample's range and stays where it is.
        low, high = np.fmin(self._low, following), np.fmax(self._high, following)
        numeric = np.clip(moved, low, high).astype(np.float32)
        return torch.from_numpy(numeric), torch.from_numpy(self.log.categorical[next_rows])

    def _standardised(self, present: np.ndarray) -> np.ndarray:
        return np.nan_to_num((present - self._centre) / self._spread, posinf=0.0, neginf=0.0)

    def _features_of_state(self, present: np.ndarray) -> np.ndarray:
        state = self._standardised(present)
        return np.concatenate([state, state**2], axis=1)

    def _features_of_event(self, present: np.ndarray, amounts: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
        # Hat functions: a response that bends where few amounts lie is met as well as one that is linear.
        paid = [np.interp(amounts, self.grid, hat) for hat in np.eye(len(self.grid))[1:]]
        relative = (amounts / self._scale)[:, None]
        paid = [*(column[:, None] for column in paid), relative * self._standardised(present)]
        return np.concatenate([*paid, outcomes / self._outcome_scale, outcomes > 0], axis=1)
