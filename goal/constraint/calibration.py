"""Choosing the multiplier that meets a return-on-investment target (Algorithm 2).

Departures from the algorithm as published:

* It compares the ROI of the calibration users with the target. With `confidence` the comparison takes a lower
  bound for the ROI of NEW users, because the calibration users and the new ones are both samples.
* It trusts every comparison. A noisy curve can pass by luck at one multiplier and fail at the next, so a pass is
  confirmed one multiplier further up, and the final choice is made on the evaluated curve after pooling what
  violates monotonicity (isotonic regression weighted by precision).
* It returns the largest multiplier silently when none meets the target; here `feasible` and `message` say so.
* It stops at the candidates. With `refine` a bisection goes on between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from goal.constraint.bounds import mean_bounds, pool_increasing, ratio_bounds
from goal.errors import ConfigurationError

Bounds = tuple[float, float]
DEFAULT_CONFIDENCE = 0.95
JUMP = 1.25
"""ROI that passes the target this many times, where the next smaller multiplier misses it, is worth a word."""
BELOW_NOTHING = 4.0
"""Standard errors below 0 at which a mean cost is no longer an error of estimation."""


@dataclass(frozen=True)
class Evaluation:
    """What one multiplier gave on the calibration users.

    Attributes:
        multiplier: The multiplier.
        roi: Revenue (or gain over never paying) per unit of cost; infinite where nothing was paid.
        revenue: Mean revenue per user, in the unit of what `evaluate` returned.
        cost: Mean cost per user, likewise.
        intervals: Prediction intervals for new users, `{"roi", "revenue", "cost"} -> (low, high)`.
        precision: One over the squared standard error of `roi`; 0 where nothing was paid.
        meets: Whether `roi`, or its lower bound where a confidence was asked for, reaches the target.
    """

    multiplier: float
    roi: float
    revenue: float
    cost: float
    intervals: dict[str, Bounds]
    precision: float
    meets: bool


@dataclass(frozen=True)
class Calibration:
    """The multiplier to serve with, and what is known about it.

    Attributes:
        multiplier: The smallest multiplier that meets the target, or the largest candidate where none does.
        feasible: Whether any multiplier met the target.
        roi: ROI at `multiplier` on the calibration users; infinite where nothing was paid.
        revenue: Mean revenue per user at `multiplier`.
        cost: Mean cost per user at `multiplier`.
        intervals: Prediction intervals for new users, `{"roi", "revenue", "cost"} -> (low, high)`. Each end is
            one-sided: new users fall below `low` with probability `1 - confidence`, and likewise above `high`.
        evaluations: Everything that was evaluated, by ascending multiplier.
        roi_target: The target.
        roi_kind: `"average"` or `"incremental"`.
        confidence: The confidence that the choice used, or `None` where it compared the estimate itself.
        message: A sentence or two for people.
    """

    multiplier: float
    feasible: bool
    roi: float
    revenue: float
    cost: float
    intervals: dict[str, Bounds]
    evaluations: tuple[Evaluation, ...]
    roi_target: float
    roi_kind: str
    confidence: float | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; infinite numbers become `None`."""
        return _finite(asdict(self))


def calibrate(
    evaluate: Callable[[float], tuple[ArrayLike, ArrayLike]],
    candidates: Sequence[float],
    *,
    roi_target: float,
    roi: Literal["average", "incremental"] = "average",
    confidence: float | None = None,
    baseline: ArrayLike | None = None,
    new_users: int | None = None,
    refine: float | None = None,
) -> Calibration:
    """Finds the smallest multiplier whose return on investment meets the target.

    Args:
        evaluate: Maps a multiplier to per-user revenue and cost, two arrays `(users,)`. It is called at most once
            per multiplier. Let it use the same users and the same randomness each time: the curve is smoother.
        candidates: Multipliers in ascending order; `goal.constraint.candidates` makes them.
        roi_target: Revenue (or gain) per unit of cost to reach; positive.
        roi: `"average"` is revenue / cost; `"incremental"` is (revenue - baseline) / cost, the gain over never
            paying per unit of cost.
        confidence: `None` compares the ROI of the calibration users. A number in (0.5, 1) compares a lower
            bound that new users of the same traffic reach with that probability.
        baseline: `(users,)`, revenue of the same users in the same order when they are never paid. Needed for the
            incremental ROI, unused otherwise.
        new_users: How many new users the bound speaks of; as many as `evaluate` returns by default.
        refine: `None` chooses among the candidates. A positive number bisects between the chosen candidate and
            its lower neighbour until they are at most this far apart.

    Raises:
        ConfigurationError: An argument is out of range, or `evaluate` returned something else than two finite
            arrays `(users,)` of at least two users whose mean cost is at least 0, but for the error of an estimate.

    >>> import numpy as np
    >>> def evaluate(multiplier):
    ...     cost = np.full(100, 4.0 - multiplier)
    ...     return 6.0 * np.sqrt(cost), cost
    >>> calibration = calibrate(evaluate, (0.0, 1.0, 2.0, 3.0), roi_target=4.0)
    >>> calibration.multiplier, calibration.feasible, round(calibration.roi, 3)
    (2.0, True, 4.243)
    """
    grid = _check(candidates, roi_target, roi, confidence, baseline, new_users, refine)
    evaluations: dict[float, Evaluation] = {}
    fixed_baseline = None if baseline is None or roi == "average" else np.asarray(baseline, dtype=np.float64)

    def meets(multiplier: float) -> bool:
        if multiplier not in evaluations:
            revenue, cost = _per_user(evaluate(multiplier), multiplier, fixed_baseline)
            gain = revenue if fixed_baseline is None else revenue - fixed_baseline
            evaluations[multiplier] = _evaluation(multiplier, revenue, gain, cost, roi_target, confidence, new_users)
        return evaluations[multiplier].meets

    # Algorithm 2: the smallest candidate that meets the target, if the curve is monotone.
    low, high, found = 0, len(grid) - 1, None
    while low <= high:
        middle = (low + high) // 2
        if meets(grid[middle]):
            found, high = middle, middle - 1
        else:
            low = middle + 1
    if found is None:
        for multiplier in grid:
            meets(multiplier)
    elif found + 1 < len(grid) and not meets(grid[found + 1]):
        for multiplier in grid[found + 1 :]:
            meets(multiplier)
    chosen = _smallest_that_meets(evaluations, roi_target, confidence)
    if chosen is None:
        for multiplier in grid:
            meets(multiplier)
        chosen = _smallest_that_meets(evaluations, roi_target, confidence)

    if refine is not None and chosen is not None and chosen > grid[0]:
        above = chosen
        below = max(multiplier for multiplier in evaluations if multiplier < chosen)
        while above - below > refine:
            middle = (above + below) / 2
            if middle in (above, below):  # neighbouring floats
                break
            above, below = (middle, below) if meets(middle) else (above, middle)
        chosen = _smallest_that_meets(evaluations, roi_target, confidence)

    multiplier = grid[-1] if chosen is None else chosen
    meets(multiplier)
    ordered = tuple(evaluations[key] for key in sorted(evaluations))
    best = evaluations[multiplier]
    return Calibration(
        multiplier=multiplier,
        feasible=chosen is not None,
        roi=best.roi,
        revenue=best.revenue,
        cost=best.cost,
        intervals=best.intervals,
        evaluations=ordered,
        roi_target=float(roi_target),
        roi_kind=roi,
        confidence=confidence,
        message=_message(best, ordered, chosen is not None, roi_target, roi, confidence, refine),
    )


def _check(
    candidates: Sequence[float],
    roi_target: float,
    roi: str,
    confidence: float | None,
    baseline: ArrayLike | None,
    new_users: int | None,
    refine: float | None,
) -> tuple[float, ...]:
    """The candidates as a tuple, once every argument has been found to work."""
    grid = tuple(float(multiplier) for multiplier in candidates)
    if not grid or not all(math.isfinite(multiplier) and multiplier >= 0 for multiplier in grid):
        raise ConfigurationError(f"candidates is {candidates!r}: expected at least one finite multiplier, none below 0")
    if any(later <= earlier for earlier, later in pairwise(grid)):
        raise ConfigurationError(f"candidates is {candidates!r}: expected ascending multipliers, each once")
    if not (math.isfinite(roi_target) and roi_target > 0):
        raise ConfigurationError(f"roi_target is {roi_target}: expected a positive number")
    if roi not in ("average", "incremental"):
        raise ConfigurationError(f"roi is {roi!r}: expected 'average' or 'incremental'")
    if confidence is not None and not 0.5 < confidence < 1:
        raise ConfigurationError(f"confidence is {confidence}: expected a number between 0.5 and 1, or None")
    if roi == "incremental" and baseline is None:
        raise ConfigurationError("baseline is missing: roi='incremental' needs each user's revenue when never paid")
    if roi == "incremental" and not np.isfinite(np.asarray(baseline, dtype=np.float64)).all():
        raise ConfigurationError(
            "baseline holds NaN or infinity: expected each user's finite revenue when never paid; look at what it was "
            "computed from"
        )
    if new_users is not None and new_users < 1:
        raise ConfigurationError(f"new_users is {new_users}: expected at least 1, or None for as many as calibrated on")
    if refine is not None and not (math.isfinite(refine) and refine > 0):
        raise ConfigurationError(f"refine is {refine}: expected a positive distance between multipliers, or None")
    return grid


def _per_user(
    outcome: tuple[ArrayLike, ArrayLike], multiplier: float, baseline: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    revenue, cost = (np.asarray(values, dtype=np.float64) for values in outcome)
    if revenue.ndim != 1 or revenue.shape != cost.shape or revenue.size < 2:
        raise ConfigurationError(
            f"evaluate({multiplier}) returned revenue {revenue.shape} and cost {cost.shape}: expected two arrays "
            "(users,) of the same length, at least 2; sum each user's interactions first (an off-policy estimate that "
            "abstained has none: read its reason)"
        )
    if not (np.isfinite(revenue).all() and np.isfinite(cost).all()):
        raise ConfigurationError(
            f"evaluate({multiplier}) returned NaN or infinity; look at what revenue and cost were computed from"
        )
    # Off-policy estimates put single users below 0, and with them the mean of a policy that pays next to nothing.
    if cost.mean() < -BELOW_NOTHING * cost.std() / math.sqrt(cost.size):
        raise ConfigurationError(
            f"evaluate({multiplier}) returned costs of mean {cost.mean():g}, and nothing is paid by costing less than "
            "nothing; is the sign right?"
        )
    if baseline is not None and baseline.shape != revenue.shape:
        raise ConfigurationError(
            f"baseline has shape {baseline.shape} and evaluate({multiplier}) covers {revenue.shape}: expected the "
            "same users in the same order"
        )
    return revenue, cost


def _evaluation(
    multiplier: float,
    revenue: np.ndarray,
    gain: np.ndarray,
    cost: np.ndarray,
    roi_target: float,
    confidence: float | None,
    new_users: int | None,
) -> Evaluation:
    users = revenue.size
    # Both means are noisy: the calibration users' and the new users'.
    scale = math.sqrt(1 / users + 1 / (new_users or users))
    deviations = float(stdtrit(users - 1, confidence or DEFAULT_CONFIDENCE)) * scale
    if cost.mean() > 0:
        estimate = float(gain.mean() / cost.mean())
        bounds = ratio_bounds(gain, cost, deviations)
        variance = float(np.var(gain - estimate * cost, ddof=1)) / users / float(cost.mean()) ** 2
        precision = 1 / max(variance, 1e-12 * max(estimate**2, 1e-12))
    else:
        # Nothing was paid, so no target on what a payment returns can be missed.
        estimate, bounds, precision = math.inf, (math.inf, math.inf), 0.0
    return Evaluation(
        multiplier=multiplier,
        roi=estimate,
        revenue=float(revenue.mean()),
        cost=float(cost.mean()),
        intervals={"roi": bounds, "revenue": mean_bounds(revenue, deviations), "cost": mean_bounds(cost, deviations)},
        precision=precision,
        meets=bool((estimate if confidence is None else bounds[0]) >= roi_target),
    )


def _smallest_that_meets(
    evaluations: dict[float, Evaluation], roi_target: float, confidence: float | None
) -> float | None:
    ordered = [evaluations[key] for key in sorted(evaluations)]
    paying = [evaluation for evaluation in ordered if math.isfinite(evaluation.roi)]
    pooled = pool_increasing(
        np.array([evaluation.roi for evaluation in paying]), np.array([evaluation.precision for evaluation in paying])
    )
    reached = {evaluation.multiplier: float(roi) for evaluation, roi in zip(paying, pooled, strict=True)}
    for evaluation in ordered:
        roi = reached.get(evaluation.multiplier, evaluation.roi)
        if confidence is not None and math.isfinite(roi):
            # Pooling moves the estimate; how far the bound lies below it stays the multiplier's own.
            roi -= evaluation.roi - evaluation.intervals["roi"][0]
        # It must pass by itself as well; the slack is for the last bit of the subtraction above.
        if evaluation.meets and roi >= roi_target * (1 - 1e-12):
            return evaluation.multiplier
    return None


def _message(
    best: Evaluation,
    evaluations: tuple[Evaluation, ...],
    feasible: bool,
    roi_target: float,
    kind: str,
    confidence: float | None,
    refine: float | None,
) -> str:
    name = "ROI" if kind == "average" else "incremental ROI"
    if not feasible:
        top = max(evaluations, key=lambda e: e.roi if confidence is None else e.intervals["roi"][0])
        reached = f"{name} {top.roi:.3g}"
        if confidence is not None:
            reached += f", at least {top.intervals['roi'][0]:.3g} on new users with confidence {confidence:g}"
        if top.meets:
            return (
                f"No multiplier meets the {name} target {roi_target:g} for certain: {top.multiplier:.4g} gives "
                f"{reached}, but its neighbours contradict it, so it may be noise. The largest, {best.multiplier:.4g}, "
                "is returned: calibrate on more users."
            )
        return (
            f"No multiplier meets the {name} target {roi_target:g}: the best of {len(evaluations)} evaluated, "
            f"{top.multiplier:.4g}, gives {reached}. The safest, {best.multiplier:.4g}, is returned and misses it: "
            "lower the target, or do not pay."
        )
    if math.isinf(best.roi):
        return f"Multiplier {best.multiplier:.4g} pays nothing, so no target is missed and no payment gains anything."
    sentence = f"Multiplier {best.multiplier:.4g} meets the {name} target {roi_target:g} with {best.roi:.3g}"
    if confidence is None:
        sentence += " on the calibration users."
    else:
        sentence += f", and at least {best.intervals['roi'][0]:.3g} on new users with confidence {confidence:g}."
    near = [e for e in evaluations if 0 < best.multiplier - e.multiplier <= (refine or 0.0)]
    if near and not near[-1].meets and best.roi > JUMP * roi_target:
        sentence += (
            f" There the {name} jumps, from {near[-1].roi:.3g} at {near[-1].multiplier:.4g}: a policy trained on "
            "candidates that are closer together may pay more."
        )
    return sentence


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
