"""Intervals against the exact value of a target policy, over 200 simulated logs at horizons of 1, 3 and 5."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from goal.evaluation.off_policy import (
    LoggedDecisions,
    doubly_robust,
    fitted_q_evaluation,
    marginalized_importance_sampling,
    self_normalized_importance_sampling,
)
from goal.simulator import Behaviour, Parameters, preset, simulate

LOGS, USERS, SEED = 200, 300, 0
# A mixture drawn once a trajectory, so that propensities depend on the past; all amounts keep a chance.
BEHAVIOUR = Behaviour(np.array([0.5, 0.5]), np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]))


def target(fatigue: np.ndarray | float) -> np.ndarray:
    """Pays more to the rested than to the tired: `(..., 3)`."""
    chances = np.exp(np.multiply.outer(1.0 - np.asarray(fatigue), np.arange(3.0)))
    return chances / chances.sum(axis=-1, keepdims=True)


def truth(parameters: Parameters) -> np.ndarray:
    """Revenue and cost per step, by going through every fatigue that can occur."""
    states, total = {0.0: 1.0}, np.zeros(2)
    for _ in range(parameters.horizon):
        after: dict[float, float] = {}
        for fatigue, mass in states.items():
            for amount, chance in enumerate(target(fatigue)):
                total += mass * chance * np.array([parameters.expected_revenue(amount, fatigue), amount])
                following = parameters.rho * fatigue + parameters.eta * amount
                after[following] = after.get(following, 0.0) + mass * chance
        states = after
    return total / parameters.horizon


@pytest.mark.parametrize("horizon", [1, 3, 5])
def test_intervals_of_90_percent_cover_the_truth(horizon: int) -> None:
    parameters = dataclasses.replace(preset("calibrated"), base_logit=-1.0, eta=0.3, max_level=2, horizon=horizon)
    revenue, cost = truth(parameters)
    # Users are independent, so slices of one large log are logs.
    log = simulate(parameters, BEHAVIOUR, users=LOGS * USERS, seed=SEED)
    fatigue = log.numeric[:, 0].astype(np.float64)
    features, chances = np.column_stack((fatigue, np.square(fatigue))), target(fatigue)
    covered: dict[str, list[list[bool]]] = {}
    errors: dict[str, list[list[float]]] = {}
    for start in range(0, log.events, USERS * horizon):
        rows = slice(start, start + USERS * horizon)
        decisions = LoggedDecisions(
            actions=log.incentives[rows].astype(np.int64),
            propensities=log.propensity[rows],  # pyright: ignore[reportOptionalSubscript]
            target=chances[rows],
            revenue=log.revenue[rows],
            cost=log.cost[rows],
            trajectories=log.user_index[rows],
            features=features[rows],
        )
        # Cells of the square are cells of the fatigue.
        answers = (
            self_normalized_importance_sampling(decisions, weights="trajectory"),
            self_normalized_importance_sampling(decisions),
            marginalized_importance_sampling(decisions, bins=6),
            doubly_robust(decisions),
            fitted_q_evaluation(decisions),
        )
        for answer in answers:
            pairs = ((answer.revenue, revenue), (answer.roi, revenue / cost), (answer.value(2.0), revenue - 2 * cost),
                     (answer.cost, cost))  # fmt: skip
            assert not answer.abstained
            covered.setdefault(answer.estimator, []).append([low <= true <= high for (low, high), true in (
                (estimate.interval, true) for estimate, true in pairs)])  # fmt: skip
            errors.setdefault(answer.estimator, []).append([estimate.value / true - 1 for estimate, true in pairs])
    for name, rows in covered.items():
        share, error = np.mean(rows, axis=0), np.mean(errors[name], axis=0)
        print(f"horizon {horizon} {name}: covers revenue, ROI, value, cost {share}; mean relative errors {error}")
        # The cost has no noise given the amount: the fitted Q's only error is that of its linear form, which no
        # interval of it covers.
        counted = share[:3] if name == "fitted_q_evaluation" else share
        assert ((counted >= 0.80) & (counted <= 0.97)).all(), (name, share)
        assert abs(error[3]) < (1e-3 if name == "fitted_q_evaluation" else 0.02), (name, error)
