"""Scales of features, amounts and outcomes, measured on the training rows only and kept with the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from goal.errors import ConfigurationError
from goal.log.interaction_log import InteractionLog

_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class FeatureScaling:
    """Plain numbers, so that they compare, hash and survive JSON exactly.

    Attributes:
        numeric_median: F medians of the values present; they fill what is missing.
        numeric_mean: F means of the values present.
        numeric_std: F population standard deviations of the values present; 1 for a constant column.
        incentive_scale: median of the positive amounts, 1 where none is positive.
        incentive_max: the largest amount.
        outcome_scale: O means of the positive values (revenue, then objectives), 1 where none is positive.
    """

    numeric_median: tuple[float, ...]
    numeric_mean: tuple[float, ...]
    numeric_std: tuple[float, ...]
    incentive_scale: float
    incentive_max: float
    outcome_scale: tuple[float, ...]

    @classmethod
    def fit(cls, log: InteractionLog, rows: np.ndarray) -> FeatureScaling:
        """Measure the scales on ``rows`` of the log, which must be training rows.

        Raises:
            ConfigurationError: no rows came.
        """
        rows = np.asarray(rows)
        if len(rows) == 0:
            raise ConfigurationError("rows: none came; scaling needs at least one training row")
        median, mean, std = [], [], []
        for column in range(log.numeric.shape[1]):
            values = _column(log.numeric[:, column], rows)
            values = values[~np.isnan(values)]
            if len(values) == 0:  # nothing to learn from: the feature reads as 0 and flagged
                values = np.zeros(1, dtype=np.float32)
            median.append(float(np.median(values)))
            mean.append(float(values.mean(dtype=np.float64)))
            deviation = float(values.std(dtype=np.float64))
            # A constant column's deviation is rounding noise, which a division would blow up.
            negligible = deviation <= 1e-6 * max(abs(mean[-1]), float(np.finfo(np.float32).tiny))
            std.append(1.0 if negligible else deviation)
        incentives = _column(log.incentives, rows)
        positive = incentives[incentives > 0]
        outcomes = [_column(log.revenue, rows)]
        outcomes += [_column(log.objectives[:, k], rows) for k in range(log.objectives.shape[1])]
        return cls(
            numeric_median=tuple(median),
            numeric_mean=tuple(mean),
            numeric_std=tuple(std),
            incentive_scale=float(np.median(positive)) if len(positive) else 1.0,
            incentive_max=float(incentives.max()),
            outcome_scale=tuple(_positive_mean(values) for values in outcomes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return lists and numbers for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FeatureScaling:
        """Return what ``to_dict`` came from.

        Raises:
            ConfigurationError: a key is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ConfigurationError(f"scaling: keys {sorted(values)} came; expected {sorted(names)}")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in values.items()}
        return cls(**plain)


def _column(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``values[rows]`` in memory, read block by block."""
    result = np.empty(len(rows), dtype=values.dtype)
    for low in range(0, len(rows), _BLOCK_ROWS):
        result[low : low + _BLOCK_ROWS] = values[rows[low : low + _BLOCK_ROWS]]
    return result


def _positive_mean(values: np.ndarray) -> float:
    positive = values[values > 0]
    return float(positive.mean(dtype=np.float64)) if len(positive) else 1.0
