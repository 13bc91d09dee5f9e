"""The oracle against published figures, brute force and its own rollouts."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.evaluation.metrics import incremental_roi
from goal.simulator import Parameters, UserTypes, VectorEnvironment, draw_users, middle_user, oracle, preset

NEVER_PAY = 30 / (1 + np.exp(3))  # of `calibrated`, and of the middle user of `population`


def plan_outcome(parameters: Parameters, plan: tuple[float, ...], types: UserTypes) -> tuple[float, float]:
    """Revenue and cost per step of one user, written out."""
    fatigue, revenue, cost = 0.0, 0.0, 0.0
    for amount in plan:
        response = np.log(1 + amount / parameters.response_scale) if parameters.response == "log" else amount
        logit = types.base_logit[0] + types.alpha[0] * response - types.beta[0] * fatigue
        revenue += parameters.revenue_per_engagement / (1 + np.exp(-logit))
        cost += parameters.cost_rate * amount
        fatigue = types.rho[0] * fatigue + parameters.eta * response
    return revenue / len(plan), cost / len(plan)


def roll_out(environment: VectorEnvironment, policy: oracle.Oracle) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Realised revenue, mean revenue given what was paid, and cost, each a step and user (U,)."""
    realised, expected, cost = (np.zeros(environment.users) for _ in range(3))
    for t in range(environment.parameters.horizon):
        step = environment.step(policy.policy(environment.fatigue, t))
        realised += step.revenue
        expected += environment.parameters.revenue_per_engagement * step.probability
        cost += step.cost
    return tuple(total / environment.parameters.horizon for total in (realised, expected, cost))


def test_paper_figures() -> None:
    paper = preset("paper")
    best = oracle.solve(paper, 0.0)
    assert best.revenue == pytest.approx(0.5138, abs=5e-5)
    assert best.cost == pytest.approx(0.20, abs=5e-7)
    assert (best.plan[0, :90] == 0).all()
    assert plan_outcome(paper, (0.0,) * 100, middle_user(paper))[0] == 0.5
    for amount in (5.0, 10.0):
        assert plan_outcome(paper, (amount,) * 100, middle_user(paper))[0] == pytest.approx(0.019, abs=5e-4)
    assert oracle.best_constant(paper, 0.0) == (0.0, 0.5, 0.5, 0.0)


@pytest.mark.parametrize(
    ("multiplier", "value", "revenue", "cost", "roi"),
    [
        (0.0, 16.645, 16.645, 7.16, None),
        (0.5, 13.190, None, None, None),
        (1.0, 9.936, 16.246, 6.31, None),
        (1.5, 6.915, None, None, None),
        (2.0, 4.393, 12.31, 3.96, 3.11),
        (2.5, 2.744, None, None, None),
        (3.0, 1.797, 5.49, 1.23, 4.46),
    ],
)
def test_calibrated_figures(
    multiplier: float, value: float, revenue: float | None, cost: float | None, roi: float | None
) -> None:
    best = oracle.solve(preset("calibrated"), multiplier)
    assert best.value == pytest.approx(value, abs=5.1e-4)
    assert best.value == pytest.approx(best.revenue - multiplier * best.cost, abs=1e-12)
    assert best.roi == pytest.approx(best.revenue / best.cost)
    if revenue is not None:
        assert best.revenue == pytest.approx(revenue, abs=5.1e-4 if revenue > 16 else 5.1e-3)
    if cost is not None:
        assert best.cost == pytest.approx(cost, abs=1e-9)
    if roi is not None:
        assert best.roi == pytest.approx(roi, abs=5.1e-3)
    if multiplier == 2.0:
        assert incremental_roi([best.revenue], [best.cost], baseline=[NEVER_PAY]) == pytest.approx(2.75, abs=5.1e-3)


@pytest.mark.parametrize(
    ("multiplier", "value", "revenue", "cost", "roi"),
    [
        (0.0, 15.397, None, None, None),
        (0.5, 8.627, None, None, None),
        (1.0, 6.193, 9.97, 3.78, 2.64),
        (1.5, 4.811, 7.88, 2.04, 3.85),
        (2.0, 3.884, None, None, None),
        (3.0, 2.750, None, None, None),
        (5.0, 1.715, None, None, None),
    ],
)
def test_population_figures_of_the_middle_user(
    multiplier: float, value: float, revenue: float | None, cost: float | None, roi: float | None
) -> None:
    best = oracle.solve(preset("population"), multiplier)
    assert best.value == pytest.approx(value, abs=5.1e-4)
    for found, expected in ((best.revenue, revenue), (best.cost, cost), (best.roi, roi)):
        if expected is not None:
            assert found == pytest.approx(expected, abs=5.1e-3)


@pytest.mark.parametrize("name", ["calibrated", "population"])
def test_never_paying_earns_what_it_should(name: str) -> None:
    best = oracle.solve(preset(name), 1e3)
    assert (best.plan == 0).all()
    assert best.revenue == pytest.approx(NEVER_PAY)
    assert best.revenue == pytest.approx(1.423, abs=5e-4)
    assert best.cost == 0
    assert best.roi == float("inf")


def test_never_paying_is_most_of_the_value_at_a_high_multiplier() -> None:
    calibrated = preset("calibrated")
    reference = oracle.best_constant(calibrated, 3.0)
    assert reference.amount == 0
    assert reference.value / oracle.solve(calibrated, 3.0).value == pytest.approx(0.79, abs=5e-3)


def test_the_most_revenue_that_meets_a_return_of_three() -> None:
    point = oracle.best_revenue(preset("calibrated"), 3.0)
    assert point.revenue == pytest.approx(13.17, abs=5e-3)
    assert point.revenue == pytest.approx(3.0 * point.cost)
    assert 1.95 < point.multiplier < 2.0
    easy = oracle.best_revenue(preset("calibrated"), 1.0)
    assert easy.revenue == pytest.approx(oracle.solve(preset("calibrated"), 0.0).revenue)


@pytest.mark.parametrize("multiplier", [0.0, 0.7, 2.0, 3.5])
@pytest.mark.parametrize(
    "changes", [{}, {"eta": 0.8, "rho": 0.6}, {"response": "log", "response_scale": 0.5, "beta": 2.5, "eta": 1.0}]
)
def test_no_plan_of_a_short_episode_is_better(changes: dict[str, float], multiplier: float) -> None:
    parameters = dataclasses.replace(preset("calibrated"), horizon=6, max_level=3, **changes)
    outcomes = np.array(
        [
            plan_outcome(parameters, plan, middle_user(parameters))
            for plan in itertools.product(parameters.levels.tolist(), repeat=6)
        ]
    )
    values = outcomes[:, 0] - multiplier * outcomes[:, 1]
    best = oracle.solve(parameters, multiplier)
    assert best.value == pytest.approx(values.max(), abs=1e-7)
    assert (best.revenue, best.cost) == pytest.approx(
        plan_outcome(parameters, tuple(best.plan[0]), middle_user(parameters))
    )
    constant = oracle.best_constant(parameters, multiplier)
    constants = [plan_outcome(parameters, (amount,) * 6, middle_user(parameters)) for amount in parameters.levels]
    assert constant.value == pytest.approx(max(revenue - multiplier * cost for revenue, cost in constants))
    assert (constant.revenue, constant.cost) == pytest.approx(constants[int(constant.amount)])


def test_no_random_change_of_a_long_plan_is_better() -> None:
    parameters, rng = preset("calibrated"), np.random.default_rng(0)
    best = oracle.solve(parameters, 2.0)
    for _ in range(1000):
        plan = best.plan[0].copy()
        steps = rng.choice(100, rng.integers(1, 4), replace=False)
        plan[steps] = rng.choice(parameters.levels, len(steps))
        revenue, cost = plan_outcome(parameters, tuple(plan), middle_user(parameters))
        assert revenue - 2.0 * cost <= best.value + 1e-5


def test_its_policy_earns_its_figures_in_the_environment() -> None:
    best = oracle.solve(preset("calibrated"), 2.0)
    realised, expected, cost = roll_out(VectorEnvironment(preset("calibrated"), users=5000, seed=0), best)
    np.testing.assert_allclose(expected, best.revenue)
    np.testing.assert_allclose(cost, best.cost)
    assert realised.mean() == pytest.approx(best.revenue, abs=4.5 * realised.std() / np.sqrt(5000))


def test_its_policy_answers_any_fatigue() -> None:
    parameters = dataclasses.replace(preset("calibrated"), horizon=5)
    best = oracle.solve(parameters, 1.0)
    fatigue = np.array([0.0, 0.4, 1.1, 2.0])
    immediate = parameters.expected_revenue(parameters.levels[:, None], fatigue) - parameters.levels[:, None]
    np.testing.assert_array_equal(best.policy(fatigue, 4), parameters.levels[immediate.argmax(0)])
    with pytest.raises(ConfigurationError, match=r"t must lie in \[0, 5\)"):
        best.policy(fatigue, 5)


def test_each_user_of_a_population_is_solved_alone() -> None:
    parameters = preset("population")
    best = oracle.solve_users(parameters, 1.0, users=19, seed=4)
    types = draw_users(parameters, users=19, seed=4)
    for user in (0, 7, 8, 18):
        alone = dataclasses.replace(
            parameters,
            base_logit=types.base_logit[user],
            alpha=types.alpha[user],
            beta=types.beta[user],
            rho=types.rho[user],
            rho_spread=0.0,
        )
        exact = oracle.solve(alone, 1.0)
        value = best.user_revenue[user] - best.user_cost[user]
        assert value == pytest.approx(exact.value, rel=2e-4)
        assert value <= exact.value + 1e-5
    assert best.revenue == pytest.approx(best.user_revenue.mean())
    assert best.value == pytest.approx(best.revenue - best.cost)


def test_a_population_s_policy_earns_its_figures_for_the_users_of_its_seed() -> None:
    parameters = preset("population")
    best = oracle.solve_users(parameters, 1.5, users=30, seed=4)
    _, expected, cost = roll_out(VectorEnvironment(parameters, users=30, seed=4), best)
    np.testing.assert_allclose(expected, best.user_revenue)
    np.testing.assert_allclose(cost, best.user_cost)
    with pytest.raises(ConfigurationError, match=r"fatigue must have shape \(30,\)"):
        best.policy(np.zeros(3), 0)


def test_users_who_are_alike_are_solved_once() -> None:
    one, many = oracle.solve(preset("calibrated"), 2.0), oracle.solve_users(preset("calibrated"), 2.0, users=50, seed=0)
    assert many.value == pytest.approx(one.value)
    assert many.user_cost.shape == (50,)


def test_the_best_constant_of_a_population_is_one_amount_for_all() -> None:
    parameters = preset("population")
    for multiplier in (0.0, 1.0):
        constant = oracle.best_constant(parameters, multiplier, users=40, seed=4)
        totals = []
        for amount in parameters.levels:
            environment = VectorEnvironment(parameters, users=40, seed=4)
            steps = [environment.step(np.full(40, amount)) for _ in range(parameters.horizon)]
            revenue = 30 * np.mean([step.probability.mean() for step in steps])
            totals.append((revenue - multiplier * parameters.cost(amount), revenue, parameters.cost(amount)))
        assert constant[1:] == pytest.approx(max(totals))
        assert parameters.cost(constant.amount) == constant.cost


def test_a_finer_grid_changes_nothing_that_is_printed() -> None:
    for name, multiplier in (("calibrated", 2.5), ("population", 1.0)):
        coarse, fine = (oracle.solve(preset(name), multiplier, grid=grid).value for grid in (1001, 4001))
        assert coarse == pytest.approx(fine, abs=1e-4)


def test_proposition_1_bounds_the_multipliers_at_which_paying_helps_now() -> None:
    parameters = preset("calibrated")
    for fatigue in (0.0, 0.5, 2.0):
        threshold = oracle.immediate_threshold(parameters, fatigue)
        revenue = parameters.expected_revenue(parameters.levels, fatigue)
        assert (revenue - (threshold + 1e-9) * parameters.levels).argmax() == 0
        assert (revenue - (threshold - 1e-6) * parameters.levels).argmax() > 0


def test_incentives_that_do_not_tire_are_paid_as_if_each_step_were_the_last() -> None:
    parameters = dataclasses.replace(preset("calibrated"), eta=0.0)
    best = oracle.solve(parameters, 1.0)
    immediate = parameters.expected_revenue(parameters.levels, 0.0) - parameters.levels
    assert (best.plan == parameters.levels[immediate.argmax()]).all()


def test_mistakes_are_named() -> None:
    calibrated = preset("calibrated")
    with pytest.raises(ConfigurationError, match="multiplier must be finite, got nan"):
        oracle.solve(calibrated, float("nan"))
    with pytest.raises(ConfigurationError, match="grid must have at least 2 points, got 1"):
        oracle.solve(calibrated, 1.0, grid=1)
    with pytest.raises(ConfigurationError, match="roi_target must be above 0 and finite, got 0"):
        oracle.best_revenue(calibrated, 0.0)
