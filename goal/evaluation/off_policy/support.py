"""Whether the log speaks of what the target would do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goal.evaluation.off_policy.decisions import Floats, LoggedDecisions, kish

FEW = 10
LARGE_RATIO = 100.0
WARN = 0.01


@dataclass(frozen=True)
class Support:
    """How far the log covers the target.

    Attributes:
        never: share of the target's decisions whose action was never logged.
        rarely: share whose action was logged, but fewer than 10 times.
        unsupported: share that cannot be valued: `never`, or what the mean ratio shows to be missing where that is
            more. The mean of target over logged probability is 1 where every action of the target could be logged.
        mean_ratio: mean over decisions of target over logged probability.
        largest_ratio: the largest of them, for one decision.
        effective_sample_size: Kish's effective number of decisions, ratios taken one decision at a time.
        warnings: sentences for a report; empty where the support is good.
    """

    never: float
    rarely: float
    unsupported: float
    mean_ratio: float
    largest_ratio: float
    effective_sample_size: float
    warnings: tuple[str, ...]


def support(decisions: LoggedDecisions) -> Support:
    """Measure the support of a target policy in a log, decision by decision.

    Args:
        decisions: the logged decisions with the target's probabilities.
    """
    target, ratios = np.asarray(decisions.target), decisions.ratios
    counts = np.bincount(np.asarray(decisions.actions), minlength=target.shape[1])
    mass = target.mean(axis=0)
    never = float(mass[counts == 0].sum())
    rarely = float(mass[(counts > 0) & (counts < FEW)].sum())
    # Ratios of one user go together, so the error of their mean is counted by user.
    mean = float(ratios.mean())
    sums = np.bincount(np.asarray(decisions.users), weights=ratios - mean)
    error = float(np.sqrt(np.square(sums).sum()) / len(ratios))
    unsupported = max(never, 1 - mean - 3 * error, 0.0)
    size = float(kish(ratios))
    warnings = []
    if never > WARN:
        warnings.append(f"{never:.1%} of what the target would pay was never paid in the log.")
    elif unsupported > WARN:
        warnings.append(
            f"At least {unsupported:.1%} of the target's decisions have no chance in the log: the ratios of target to "
            f"logged probability have mean {mean:.3f} where full support gives 1."
        )
    if rarely > WARN:
        warnings.append(f"{rarely:.1%} of what the target would pay was paid fewer than {FEW} times in the log.")
    if mean - 3 * error > 1 + WARN:
        warnings.append(
            f"The ratios of target to logged probability have mean {mean:.3f}, not 1: the logged propensities are too "
            "small to be those of the amounts drawn. Check how they were logged."
        )
    if ratios.max() > LARGE_RATIO:
        warnings.append(f"One decision counts {ratios.max():.0f}-fold: its amount was very unlikely in the log.")
    return Support(never, rarely, unsupported, mean, float(ratios.max()), size, tuple(warnings))


def amount_support(logged: Floats, paid: Floats, *, tolerance: float = 0.1) -> tuple[float, float]:
    """Shares of amounts that the log never, and rarely (fewer than 10 times), shows, without propensities.

    Args:
        logged: `(N,)` amounts that the log shows.
        paid: `(n,)` amounts that the target would pay.
        tolerance: relative distance at which a logged amount speaks for another.
    """
    ordered = np.sort(logged)
    reach = tolerance * np.abs(paid)
    counts = np.searchsorted(ordered, paid + reach, side="right") - np.searchsorted(ordered, paid - reach, side="left")
    return float((counts == 0).mean()), float(((counts > 0) & (counts < FEW)).mean())
