"""Each estimator against a slow one written from its formula, and what must hold exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.evaluation.off_policy import (
    LoggedDecisions,
    aggregate,
    doubly_robust,
    fitted_q_evaluation,
    marginalized_importance_sampling,
    nearest,
    self_normalized_importance_sampling,
)
from goal.simulator import preset, simulate

LOW = {"minimum_effective_size": 2.0}


def trajectory(decisions, **settings):
    return self_normalized_importance_sampling(decisions, weights="trajectory", **settings)


ESTIMATORS = {
    "trajectory": trajectory,
    "per decision": self_normalized_importance_sampling,
    "marginalised": lambda decisions, **settings: marginalized_importance_sampling(decisions, bins=2, **settings),
    "doubly robust": doubly_robust,
    "fitted Q": fitted_q_evaluation,
}


def small(*, users: int = 60, actions: int = 3, ragged: bool = True, seed: int = 0) -> LoggedDecisions:
    """Trajectories of 1 to 4 decisions, two of each user, in a world where the state follows the last action."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 2 * users) if ragged else np.full(2 * users, 3)
    rows = int(lengths.sum())
    behaviour = rng.dirichlet(np.full(actions, 5.0), rows)
    chosen = np.array([rng.choice(actions, p=chances) for chances in behaviour])
    state = np.r_[0, chosen[:-1]] + rng.normal(size=rows)
    return LoggedDecisions(
        actions=chosen,
        propensities=behaviour[np.arange(rows), chosen],
        target=rng.dirichlet(np.full(actions, 4.0), rows),
        revenue=state + 2.0 * chosen + rng.normal(size=rows),
        cost=chosen * 1.0,
        trajectories=np.repeat(np.arange(2 * users), lengths),
        users=np.repeat(np.arange(2 * users) // 2, lengths),
        features=state[:, None],
    )


def listed(decisions: LoggedDecisions) -> list[list[int]]:
    """Row numbers of each trajectory."""
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(np.asarray(decisions.trajectories).tolist()):
        rows.setdefault(name, []).append(row)
    return list(rows.values())


def slow_trajectory(d: LoggedDecisions) -> float:
    above = below = 0.0
    for rows in listed(d):
        weight = np.prod([d.target[i, d.actions[i]] / d.propensities[i] for i in rows])
        above += weight * sum(d.revenue[i] for i in rows)
        below += weight * len(rows)
    return above / below


def slow_per_decision(d: LoggedDecisions) -> float:
    total = 0.0
    for t in range(4):
        there = [rows for rows in listed(d) if len(rows) > t]
        weights = [np.prod([d.target[i, d.actions[i]] / d.propensities[i] for i in rows[: t + 1]]) for rows in there]
        if there:
            total += len(there) * np.average([d.revenue[rows[t]] for rows in there], weights=weights)
    return total / len(d)


def slow_marginalised(d: LoggedDecisions) -> float:
    """By tables of rewards and moves, as the method is usually told."""
    cells = aggregate(d, 2)
    everything = listed(d)
    share = {z: np.mean([cells[rows[0]] == z for rows in everything]) for z in set(cells.tolist())}
    above = below = 0.0
    for t in range(4):
        after = dict.fromkeys(share, 0.0)
        for z, mass in share.items():
            there = [rows for rows in everything if len(rows) > t and cells[rows[t]] == z]
            if not there:
                continue
            ratio = np.array([d.target[rows[t], d.actions[rows[t]]] / d.propensities[rows[t]] for rows in there])
            reward = np.average([d.revenue[rows[t]] for rows in there], weights=ratio)
            above, below = above + mass * reward, below + mass
            for rows, weight in zip(there, ratio / ratio.sum(), strict=True):
                if len(rows) > t + 1:
                    after[cells[rows[t + 1]]] += mass * weight
        share = after
    return above / below


def slow_q(d: LoggedDecisions, outcomes: np.ndarray, fitted: list[list[int]], ridge: float):
    """Q(row, action) of each step by least squares with the penalty as rows of data."""
    scaled = (d.features[:, 0] - d.features[:, 0].mean()) / d.features[:, 0].std()
    actions = d.target.shape[1]

    def basis(row: int, action: int) -> np.ndarray:
        state = [1.0, scaled[row]]
        return np.array(state + [x * (action == a) for a in range(actions) for x in state])

    coefficients: dict[int, np.ndarray] = {}

    def value(row: int, t: int) -> float:
        return sum(d.target[row, a] * basis(row, a) @ coefficients[t] for a in range(actions))

    for t in reversed(range(4)):
        there = [rows for rows in fitted if len(rows) > t]
        goal = [outcomes[rows[t]] + (value(rows[t + 1], t + 1) if len(rows) > t + 1 else 0.0) for rows in there]
        table = np.array([basis(rows[t], d.actions[rows[t]]) for rows in there])
        penalty = np.sqrt(ridge) * np.eye(table.shape[1])
        penalty[0] = 0.0
        coefficients[t] = np.linalg.lstsq(np.vstack((table, penalty)), np.r_[goal, np.zeros(len(penalty))], rcond=None)[
            0
        ]
    return lambda row, t: basis(row, d.actions[row]) @ coefficients[t], value


def test_importance_sampling_is_its_formula() -> None:
    decisions = small()
    assert trajectory(decisions, **LOW).revenue.value == pytest.approx(slow_trajectory(decisions), rel=1e-10)
    answer = self_normalized_importance_sampling(decisions, **LOW)
    assert answer.revenue.value == pytest.approx(slow_per_decision(decisions), rel=1e-10)


def test_marginalised_is_its_formula() -> None:
    decisions = small(users=200)
    answer = marginalized_importance_sampling(decisions, bins=2, **LOW)
    assert answer.revenue.value == pytest.approx(slow_marginalised(decisions), rel=1e-10)


def test_fitted_q_is_its_formula() -> None:
    decisions = small()
    everything, centre = listed(decisions), decisions.revenue.mean()
    _, value = slow_q(decisions, decisions.revenue - centre, everything, 1e-6)
    expected = centre + np.sum([value(rows[0], 0) for rows in everything]) / len(decisions)
    assert fitted_q_evaluation(decisions, ridge=1e-6, **LOW).revenue.value == pytest.approx(expected, rel=1e-4)


def test_doubly_robust_is_its_formula() -> None:
    decisions = small()
    everything, centre = listed(decisions), decisions.revenue.mean()
    # Cross-fitting: the parts are drawn as doubly_robust draws them; everything else is written anew.
    part = np.random.default_rng(0).permutation(decisions.clusters) % 2
    weights = np.ones((len(everything), 5))
    for u, rows in enumerate(everything):
        for t in range(4):
            ratio = decisions.target[rows[t], decisions.actions[rows[t]]] / decisions.propensities[rows[t]] if (
                t < len(rows)) else 1.0  # fmt: skip
            weights[u, t + 1] = weights[u, t] * ratio
    weights /= weights.sum(axis=0)
    total = 0.0
    for fold in range(2):
        fitted = [rows for rows in everything if part[decisions.users[rows[0]]] != fold]
        chosen, value = slow_q(decisions, decisions.revenue - centre, fitted, 1.0)
        for u, rows in enumerate(everything):
            if part[decisions.users[rows[0]]] == fold:
                for t, row in enumerate(rows):  # Thomas & Brunskill's form
                    reward = decisions.revenue[row] - centre
                    total += weights[u, t] * value(row, t) + weights[u, t + 1] * (reward - chosen(row, t))
    expected = centre + total * len(everything) / len(decisions)
    assert doubly_robust(decisions, folds=2, **LOW).revenue.value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("name", ["trajectory", "per decision", "marginalised"])
def test_the_behaviour_itself_has_the_logs_mean(name: str) -> None:
    given = small()
    target = np.zeros(given.target.shape)
    target[np.arange(len(given)), given.actions] = given.propensities
    target += ((1 - given.propensities) / (target.shape[1] - 1))[:, None] * (target == 0)
    answer = ESTIMATORS[name](replace(given, target=target), **LOW)
    assert answer.revenue.value == pytest.approx(given.revenue.mean())
    assert answer.cost.value == pytest.approx(given.cost.mean())
    assert answer.roi.value == pytest.approx(given.revenue.mean() / given.cost.mean())
    assert answer.effective_sample_size == pytest.approx(given.clusters)


@pytest.mark.parametrize("name", ["doubly robust", "fitted Q"])
def test_a_behaviour_without_chance_has_the_logs_mean_in_a_model_too(name: str) -> None:
    given = small()
    same = replace(given, target=np.eye(3)[given.actions], propensities=np.ones(len(given)))
    assert ESTIMATORS[name](same, **LOW).revenue.value == pytest.approx(given.revenue.mean(), abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_constant_more_revenue_is_a_constant_more(name: str) -> None:
    given = small(users=200)
    one, other = (ESTIMATORS[name](d, **LOW) for d in (given, replace(given, revenue=given.revenue + 100.0)))
    assert other.revenue.value == pytest.approx(one.revenue.value + 100.0)
    assert other.revenue.interval == pytest.approx([side + 100.0 for side in one.revenue.interval])
    assert other.cost == one.cost
    assert one.value(2.0).value == pytest.approx(one.revenue.value - 2 * one.cost.value)


def test_a_perfect_model_leaves_no_error_where_nothing_is_chance() -> None:
    """Two states, moves and rewards decided by the action: revenue 1 + 2 z a, next state a."""
    rng = np.random.default_rng(1)
    users, horizon = 50, 3
    actions = rng.integers(0, 2, (users, horizon))
    state = np.concatenate((np.ones((users, 1), dtype=int), actions[:, :-1]), axis=1)
    policy = np.array([[0.9, 0.1], [0.3, 0.7]])
    q = np.zeros((horizon, 2, 2))
    v = np.zeros((horizon + 1, 2))
    for t in reversed(range(horizon)):
        for z in range(2):
            for a in range(2):
                q[t, z, a] = 1 + 2 * z * a + v[t + 1, a]
            v[t, z] = policy[z] @ q[t, z]
    step = np.tile(np.arange(horizon), users)
    z, a = state.ravel(), actions.ravel()
    decisions = LoggedDecisions(
        actions=a,
        propensities=np.full(a.size, 0.5),
        target=policy[z],
        revenue=1.0 + 2 * z * a,
        cost=1.0 + 2 * z * a,
        trajectories=np.repeat(np.arange(users), horizon),
        features=z[:, None].astype(float),
    )

    class Perfect:
        def predict(self, decisions: LoggedDecisions) -> tuple[np.ndarray, np.ndarray]:
            return np.stack((q[step, z, a],) * 2, axis=1), np.stack((v[step, z],) * 2, axis=1)

    answer = doubly_robust(decisions, model=Perfect(), minimum_effective_size=5)
    assert answer.revenue.value == pytest.approx(v[0, 1] / horizon, rel=1e-12)
    assert answer.revenue.interval == pytest.approx((v[0, 1] / horizon,) * 2)
    # Features of state and action write this Q exactly, so the fitted one is perfect too.
    fitted = fitted_q_evaluation(decisions, ridge=1e-6, minimum_effective_size=5)
    assert fitted.revenue.value == pytest.approx(v[0, 1] / horizon, rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_weights_over_100_steps_mean_nothing(name: str) -> None:
    log = simulate(preset("calibrated"), "uniform", users=300, seed=0)
    target = np.full((log.events, 11), 0.05)
    target[np.arange(log.events), np.where(log.numeric[:, 0] > 2, 0, 8)] += 0.45
    decisions = LoggedDecisions.from_log(log, target, amounts=np.arange(11.0), features=log.numeric[:, :1])
    assert decisions.horizon == 100
    answer = ESTIMATORS[name](decisions)
    if name in ("marginalised", "fitted Q"):
        assert not answer.abstained and answer.effective_sample_size > 30
        return
    assert answer.abstained and answer.effective_sample_size < 15
    for estimate in (answer.revenue, answer.cost, answer.roi, answer.value(2.0)):
        assert estimate.abstained and estimate.value is None and estimate.interval is None
        assert "effective sample size is" in estimate.reason and "Shorten the horizon" in estimate.reason
    short = LoggedDecisions.from_log(log, target, amounts=np.arange(11.0), horizon=2, features=log.numeric[:, :1])
    assert not ESTIMATORS[name](short).abstained


def test_amounts_that_the_log_never_pays_are_not_valued() -> None:
    given = small()
    target = np.column_stack((given.target * 0.8, np.full(len(given), 0.2)))
    for name, estimator in ESTIMATORS.items():
        answer = estimator(replace(given, target=target), **LOW)
        assert answer.abstained and "20% of the target's decisions" in answer.reason, name


def test_states_of_one_row_are_too_fine() -> None:
    given = small()
    answer = marginalized_importance_sampling(given, states=np.arange(len(given)), **LOW)
    assert answer.abstained and "too fine" in answer.reason


def test_a_target_that_pays_nothing_has_no_roi() -> None:
    given = small(users=200)
    answer = self_normalized_importance_sampling(replace(given, cost=np.zeros(len(given))), **LOW)
    assert answer.revenue.value is not None and answer.roi.value is None
    assert "pays nothing" in answer.roi.reason


def test_trajectories_of_one_user_are_not_independent() -> None:
    given = small(ragged=False)
    twice = np.concatenate((np.arange(len(given)),) * 2)
    same = np.asarray(given.trajectories)
    doubled = LoggedDecisions(
        given.actions[twice],
        given.propensities[twice],
        given.target[twice],
        given.revenue[twice],
        given.cost[twice],
        trajectories=np.concatenate((same, same + same.max() + 1)),
        users=given.users[twice],
    )
    one, two = (self_normalized_importance_sampling(d, **LOW) for d in (replace(given, features=None), doubled))
    width_one, width_two = (answer.revenue.interval[1] - answer.revenue.interval[0] for answer in (one, two))
    assert width_two == pytest.approx(width_one, rel=0.05)  # but for the degrees of freedom


GOOD = {"actions": [0, 1], "propensities": [0.5, 0.5], "target": [[0.5, 0.5]] * 2, "revenue": [1, 2], "cost": [0, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": [[0.5, 0.6]] * 2}, "target: .*sum to 1.*Divide each row"),
        ({"target": [[1.5, -0.5]] * 2}, "target: .*at least 0"),
        ({"target": np.empty((0, 2)), "actions": np.empty(0, int)}, "at least one decision"),
        ({"actions": [0, 2]}, "actions run from 0 to 2: expected 0 to 1"),
        ({"actions": [0.0, 1.0]}, "actions has type float64"),
        ({"propensities": [0.0, 0.5]}, "propensities run from 0 to 0.5"),
        ({"propensities": [0.5]}, r"propensities has shape \(1,\): expected \(2\)"),
        ({"revenue": [np.nan, 1]}, "revenue holds NaN"),
        ({"features": [1.0, 2.0]}, "features has shape"),
        ({"trajectories": [0, 0], "users": [0, 1]}, "a trajectory has two users"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoggedDecisions(**(GOOD | change))


def test_bad_settings_are_named() -> None:
    given = small()
    for call, message in (
        (lambda: trajectory(given, confidence=1.5), "confidence is 1.5"),
        (lambda: fitted_q_evaluation(given, minimum_effective_size=1), "minimum_effective_size is 1"),
        (lambda: self_normalized_importance_sampling(given, weights="all"), "weights is 'all'"),  # type: ignore[arg-type]
        (lambda: fitted_q_evaluation(given, ridge=0.0), "ridge is 0"),
        (lambda: doubly_robust(given, folds=1), "folds is 1: expected 2 to 60"),
        (lambda: marginalized_importance_sampling(given, states=[1, 2]), "states has type"),
        (lambda: marginalized_importance_sampling(given, bins=0), "bins is 0"),
        (lambda: nearest([1.0, 1.0], np.ones(2)), "amounts: .*ascending"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()
    apart = GOOD | {"actions": [0, 1, 0], "propensities": [0.5] * 3, "target": [[0.5, 0.5]] * 3,
                    "revenue": [1, 2, 3], "cost": [0, 1, 0], "trajectories": [0, 1, 0]}  # fmt: skip
    with pytest.raises(ConfigurationError, match="rows of one trajectory are apart"):
        LoggedDecisions(**apart)


def test_a_log_without_propensities_is_refused() -> None:
    log = replace(simulate(preset("calibrated"), "uniform", users=2, seed=0), propensity=None)
    with pytest.raises(ConfigurationError, match="names no propensity"):
        LoggedDecisions.from_log(log, np.full((200, 11), 1 / 11), amounts=np.arange(11.0))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("ragged", [False, True])
def test_what_comes_in_anyway_moves_an_estimate_and_widens_nothing(name: str, ragged: bool) -> None:
    decisions = small(users=200, ragged=ragged)
    before = ESTIMATORS[name](decisions, **LOW).revenue
    after = ESTIMATORS[name](replace(decisions, revenue=decisions.revenue + 50.0), **LOW).revenue
    assert after.value == pytest.approx(before.value + 50, rel=1e-9)
    widths = [high - low for low, high in (before.interval, after.interval)]
    assert widths[1] == pytest.approx(widths[0], rel=1e-6)
