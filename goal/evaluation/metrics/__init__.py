"""Measures of a stream of interactions, one a file, as plain functions of NumPy arrays."""

from __future__ import annotations

from goal.evaluation.metrics.incremental_roi import incremental_roi
from goal.evaluation.metrics.regret import regret
from goal.evaluation.metrics.rev import rev
from goal.evaluation.metrics.roi import roi
from goal.evaluation.metrics.roi_violation_rate import roi_violation_rate, window_roi
from goal.evaluation.metrics.share_of_gain import is_gain_large, share_of_gain

__all__ = [
    "incremental_roi",
    "is_gain_large",
    "regret",
    "rev",
    "roi",
    "roi_violation_rate",
    "share_of_gain",
    "window_roi",
]
