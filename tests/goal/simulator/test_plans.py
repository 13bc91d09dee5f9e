"""Plans that ignore history, against the oracle and the environment."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from goal.simulator import VectorEnvironment, best_plan, oracle, preset

POPULATION = dataclasses.replace(preset("population"), horizon=25)


def test_where_users_are_alike_a_plan_is_as_good_as_the_oracle() -> None:
    for multiplier in (0.0, 1.0, 3.0):
        plan = best_plan(preset("calibrated"), multiplier, users=3, seed=0, types=1)
        assert plan.value == pytest.approx(oracle.solve(preset("calibrated"), multiplier).value, abs=1e-9)


def test_it_lies_between_the_best_constant_and_the_oracle_and_pays_what_it_says() -> None:
    plan = best_plan(POPULATION, 1.0, users=400, seed=3, types=20)
    constant = oracle.best_constant(POPULATION, 1.0, users=400, seed=3)
    best = oracle.solve_users(POPULATION, 1.0, users=400, seed=3)
    assert constant.value <= plan.value < best.value
    environment = VectorEnvironment(POPULATION, users=400, seed=3)
    environment.reset()
    revenue = cost = 0.0
    for amount in plan.amounts:
        step = environment.step(np.full(400, amount))
        revenue += POPULATION.revenue_per_engagement * step.probability.mean() / POPULATION.horizon
        cost += step.cost.mean() / POPULATION.horizon
    assert (plan.revenue, plan.cost) == pytest.approx((revenue, cost))
    assert plan.value == pytest.approx(revenue - cost)
