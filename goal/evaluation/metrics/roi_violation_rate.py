"""ROI violation rate (RVR) over sliding windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError
from goal.evaluation.metrics._checks import revenue_and_cost

# Windows are differences of running sums, whose rounding must not turn a window that just meets the target into a miss.
TIE = 1e-9


def roi_violation_rate(
    revenue: ArrayLike, cost: ArrayLike, *, target: float, window: int, stride: int | None = None
) -> float:
    """Share of sliding windows whose realised ROI falls below the target. Lower is better.

        RVR = (number of windows w with C_w > 0 and R_w < target * C_w) / (number of windows)

    where `R_w` and `C_w` are the sums of revenue and cost over the `window` interactions that begin at 0, `stride`,
    `2 * stride`, ... A window with no cost counts as satisfied; what is left after the last full window is not counted.

    Source: "Evaluation Metrics" of the paper, which leaves the window and the stride open.

    Args:
        revenue: `(N,)`, revenue of each interaction in time order, in money.
        cost: `(N,)`, its cost in money, at least 0.
        target: The ROI to reach.
        window: Interactions per window.
        stride: Interactions between the starts of neighbouring windows; a quarter of the window by default.

    Returns:
        A share in [0, 1].

    Raises:
        ConfigurationError: The stream is shorter than a window, not one-dimensional or not finite, or a setting is
            out of range.

    >>> roi_violation_rate([9.0, 0.0, 0.0, 9.0], [1.0, 1.0, 1.0, 1.0], target=3.0, window=2, stride=1)
    0.3333333333333333
    """
    if not (np.isfinite(target) and target > 0):
        raise ConfigurationError(f"target is {target}: expected a positive number")
    window_revenue, window_cost, paid = _windows(revenue, cost, window, stride)
    required = target * window_cost
    tie = TIE * np.maximum(np.abs(window_revenue), required)
    return float(np.mean(paid & (window_revenue < required - tie)))


def window_roi(revenue: ArrayLike, cost: ArrayLike, *, window: int, stride: int | None = None) -> NDArray[np.float64]:
    """ROI of each of those windows, `(windows,)`; `inf` where a window has no cost. Arguments and errors as above.

    >>> window_roi([9.0, 0.0, 0.0, 9.0], [1.0, 1.0, 1.0, 2.0], window=2, stride=1)
    array([4.5, 0. , 3. ])
    """
    window_revenue, window_cost, paid = _windows(revenue, cost, window, stride)
    return np.where(paid, window_revenue, np.inf) / np.where(paid, window_cost, 1.0)


def _windows(
    revenue: ArrayLike, cost: ArrayLike, window: int, stride: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    revenue, cost = revenue_and_cost(revenue, cost)
    if revenue.ndim != 1:
        raise ConfigurationError(f"revenue has shape {revenue.shape}: expected one stream (N,) in time order")
    if window < 1:
        raise ConfigurationError(f"window is {window}: expected at least 1 interaction")
    stride = max(window // 4, 1) if stride is None else stride
    if stride < 1:
        raise ConfigurationError(f"stride is {stride}: expected at least 1 interaction, or None for a quarter window")
    if revenue.size < window:
        raise ConfigurationError(
            f"the stream has {revenue.size} interactions and window is {window}: make the window smaller"
        )
    starts = np.arange(0, revenue.size - window + 1, stride)

    def sums(stream: np.ndarray) -> np.ndarray:
        running = np.concatenate((np.zeros(1, dtype=stream.dtype), np.cumsum(stream)))
        return running[starts + window] - running[starts]

    # Counted in whole numbers: a difference of running sums of cost is rarely exactly zero.
    paid = sums((cost > 0).astype(np.int64)) > 0
    return sums(revenue), sums(cost), paid
