"""What an off-policy estimator answers: an estimate with an interval, or an abstention with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from goal.constraint.bounds import mean_bounds, ratio_bounds
from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, LoggedDecisions
from goal.evaluation.off_policy.support import support

MINIMUM_EFFECTIVE_SIZE = 30.0
# A share of the target's decisions that the log cannot speak of moves no figure by more than the intervals do.
MOST_UNSUPPORTED = 0.05


@dataclass(frozen=True)
class Estimate:
    """One quantity of a target policy, from a log of another.

    Attributes:
        value: the estimate; None where the estimator abstained.
        interval: its two-sided confidence interval, likewise; a side of a ratio may be infinite.
        effective_sample_size: how many trajectories drawn by the target itself would be as good, by Kish's formula
            `(sum w)^2 / sum w^2`; at most the number of trajectories and of users.
        abstained: whether the estimator declined to answer.
        reason: why it abstained and what to do; empty otherwise.
    """

    value: float | None
    interval: tuple[float, float] | None
    effective_sample_size: float
    abstained: bool = False
    reason: str = ""


@dataclass(frozen=True, eq=False)
class OffPolicyEstimates:
    """Revenue, cost and ROI of a target policy, per decision.

    Attributes:
        estimator: name of the function that made it.
        confidence: of the intervals.
        effective_sample_size: as in `Estimate`.
        reason: why it abstained; empty where it did not.
        per_user: `(C, 2)` revenue and cost: one value a user, whose mean over users is the estimate and whose spread
            is its error (influence function); empty where it abstained. These also suit `constraint.calibrate`.
    """

    estimator: str
    confidence: float
    effective_sample_size: float
    reason: str
    per_user: Floats = field(repr=False)

    @property
    def abstained(self) -> bool:
        """Whether the estimator declined to answer."""
        return bool(self.reason)

    @property
    def revenue(self) -> Estimate:
        """Revenue per decision, in money."""
        return self._mean(np.array([1.0, 0.0]))

    @property
    def cost(self) -> Estimate:
        """Cost per decision, in money."""
        return self._mean(np.array([0.0, 1.0]))

    def value(self, multiplier: float) -> Estimate:
        """Revenue less `multiplier` times cost per decision, in money."""
        return self._mean(np.array([1.0, -multiplier]))

    @cached_property
    def roi(self) -> Estimate:
        """Revenue per unit of cost, by Fieller's method; an abstention where the target pays nothing."""
        if self.abstained:
            return self._none(self.reason)
        revenue, cost = self.per_user.T
        if cost.mean() <= 0:
            return self._none("The target pays nothing, so revenue per unit of cost has no value; read the revenue.")
        bounds = ratio_bounds(revenue, cost, self._deviations)
        return Estimate(float(revenue.mean() / cost.mean()), bounds, self.effective_sample_size)

    @property
    def _deviations(self) -> float:
        # The weights leave an effective number of trajectories, so Student's t has that many degrees of freedom.
        quantile = stdtrit(max(self.effective_sample_size - 1, 1.0), (1 + self.confidence) / 2)
        return float(quantile) / math.sqrt(len(self.per_user))

    def _mean(self, direction: Floats) -> Estimate:
        if self.abstained:
            return self._none(self.reason)
        values = self.per_user @ direction
        return Estimate(float(values.mean()), mean_bounds(values, self._deviations), self.effective_sample_size)

    def _none(self, reason: str) -> Estimate:
        return Estimate(None, None, self.effective_sample_size, True, reason)


def check_settings(confidence: float, minimum_effective_size: float) -> None:
    """Raises ConfigurationError where the settings that all estimators share cannot work."""
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence is {confidence}: expected between 0 and 1, e.g. 0.9")
    if not minimum_effective_size >= 2:
        raise ConfigurationError(
            f"minimum_effective_size is {minimum_effective_size}: expected at least 2 trajectories, or no interval "
            "can be told"
        )


def conclude(
    estimator: str,
    decisions: LoggedDecisions,
    influence: Floats,
    effective_size: float,
    *,
    confidence: float,
    minimum_effective_size: float,
    reason: str = "",
) -> OffPolicyEstimates:
    """The answer of an estimator, or its abstention.

    Args:
        estimator: its name.
        decisions: what it was given.
        influence: `(M, 2)` values per trajectory whose mean is the estimate per decision, and whose spread its error.
        effective_size: of its weights.
        confidence: of the intervals.
        minimum_effective_size: it abstains below.
        reason: of its own to abstain.
    """
    # Users are independent, trajectories of one user are not: a user with many of them is still one.
    size = float(min(effective_size, decisions.clusters))
    if not reason:
        reason = _reason(decisions, size, minimum_effective_size)
    if reason:
        return OffPolicyEstimates(estimator, confidence, size, reason, np.empty((0, 2)))
    mean = influence.mean(axis=0)
    users, trajectories = decisions.clusters, len(influence)
    sums = np.stack(
        [np.bincount(decisions.owners, weights=column, minlength=users) for column in (influence - mean).T], axis=1
    )
    return OffPolicyEstimates(estimator, confidence, size, "", mean + sums * (users / trajectories))


def _reason(decisions: LoggedDecisions, size: float, minimum: float) -> str:
    unsupported = support(decisions).unsupported
    if unsupported > MOST_UNSUPPORTED:
        return (
            f"The log shows nothing of {unsupported:.0%} of the target's decisions (at most {MOST_UNSUPPORTED:.0%} may "
            "be missing): the amounts it would pay were never, or hardly ever, paid. Value a policy that stays closer "
            "to the log, or log some traffic on those amounts."
        )
    if size < minimum * (1 - 1e-9):  # rounding must not turn 30 equal weights into fewer
        return (
            f"The effective sample size is {size:.1f} of {len(decisions.lengths)} trajectories over "
            f"{decisions.horizon} decisions, and at least {minimum:g} is asked for. Shorten the horizon, take coarser "
            "amounts, value a policy closer to the log, or gather more users; marginalised and fitted Q estimates "
            "stand longer horizons."
        )
    return ""
