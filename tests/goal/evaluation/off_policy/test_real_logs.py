"""Real logs whose truth is known, the warnings that real logs must and must not raise, and the report's evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from goal.errors import ConfigurationError
from goal.evaluation.off_policy import (
    LoggedDecisions,
    confounding,
    doubly_robust,
    fitted_q_evaluation,
    log_evidence,
    marginalized_importance_sampling,
    self_normalized_importance_sampling,
    state_features,
    support,
)
from goal.evaluation.off_policy.support import amount_support
from goal.log import InteractionLog, Schema, read
from goal.simulator import preset, simulate

ONE_STEP = (
    self_normalized_importance_sampling,
    marginalized_importance_sampling,
    doubly_robust,
    fitted_q_evaluation,
)
BASKETS = Schema(
    user="household_id", time="ts", order="step", incentive="incentive_cents", revenue="revenue_cents",
    cost="retailer_cost_cents", numeric=("gap_days", "n_active_campaigns"),
)  # fmt: skip


@pytest.fixture(scope="module")
def baskets(shared_data: Path) -> InteractionLog:
    return read(shared_data / "complete_journey_baskets.parquet", BASKETS)


@pytest.fixture(scope="module")
def cash(shared_data: Path) -> dict[str, np.ndarray]:
    table = pyarrow.csv.read_csv(shared_data / "thornton_cash.csv")
    columns = {name: table[name].to_numpy().astype(np.float64) for name in table.column_names}
    known = ~(np.isnan(columns["incentive_kwacha"]) | np.isnan(columns["got"]))
    return {name: values[known] for name, values in columns.items()}


def test_the_random_log_of_open_bandit_tells_the_click_rate_of_bts(shared_data: Path) -> None:
    """The target is bts's own choice of items at each position, averaged over its log: it reads no feature there."""
    bts, random = (
        {
            column: pq.read_table(shared_data / f"open_bandit_{name}_all.parquet")[column].to_numpy()
            for column in ("item_id", "position", "click", "propensity_score")
        }
        for name in ("bts", "random")
    )
    chances = np.zeros((4, 80))
    for position in np.unique(bts["position"]):
        here = bts["position"] == position
        chances[position] = np.bincount(bts["item_id"][here], minlength=80) / here.sum()
    rate = bts["click"].mean()
    decisions = LoggedDecisions(
        actions=random["item_id"],
        propensities=random["propensity_score"],
        target=chances[random["position"]],
        revenue=random["click"],
        cost=np.ones(len(random["click"])),
        features=np.eye(4)[random["position"]][:, 1:],
    )
    found = support(decisions)
    assert found.unsupported < 0.01 and found.mean_ratio == pytest.approx(1.0, abs=0.05)
    for estimator in ONE_STEP:
        clicks = estimator(decisions).revenue
        print(estimator.__name__, clicks, "truth", rate)
        assert not clicks.abstained
        assert clicks.interval[0] < rate < clicks.interval[1] and clicks.value < 3 * rate


def test_thornton_knows_the_value_of_paying_each_amount(cash: dict[str, np.ndarray]) -> None:
    """Amounts were drawn at random, so who came at each amount is what paying it is worth."""
    amounts, actions = np.unique(cash["incentive_kwacha"], return_inverse=True)
    counts = np.bincount(actions)
    features = np.column_stack((cash["distvct"], cash["age"]))
    features = np.where(np.isnan(features), np.nanmean(features, axis=0), features)
    abstained = 0
    commonest = np.argsort(-counts)[:3]
    for index in range(len(amounts)):
        decisions = LoggedDecisions(
            actions=actions,
            propensities=(counts / counts.sum())[actions],
            target=np.eye(len(amounts))[np.full(len(actions), index)],
            revenue=cash["got"],
            cost=cash["incentive_kwacha"],
            features=features,
        )
        shown = cash["got"][actions == index].mean()
        plain = self_normalized_importance_sampling(decisions)
        assert plain.effective_sample_size == pytest.approx(counts[index])
        assert plain.abstained == (counts[index] < 30)
        abstained += plain.abstained
        if not plain.abstained:
            assert plain.revenue.value == pytest.approx(shown)
            assert plain.cost.value == pytest.approx(amounts[index])
            for estimator in (doubly_robust, fitted_q_evaluation) if index in commonest else ():
                low, high = estimator(decisions).revenue.interval
                assert low < shown < high, (amounts[index], estimator)
    assert 0 < abstained < len(amounts)


def test_the_log_of_a_shop_is_confounded(baskets: InteractionLog) -> None:
    some = baskets.select_users(np.arange(0, baskets.users, 4))
    found = confounding(some.incentives, some.revenue, state_features(some), users=some.user_index)
    assert found.confounded and found.amount > 0.05 and found.revenue > 0.05
    assert f"explains {found.amount:.0%} of the variance of the amount" in found.warning
    assert f"and {found.revenue:.0%} of the revenue" in found.warning


def test_amounts_drawn_at_random_are_not(cash: dict[str, np.ndarray]) -> None:
    features = np.column_stack((cash["distvct"], cash["age"], cash["villnum"]))
    assert not confounding(cash["incentive_kwacha"], cash["got"], features).confounded
    for seed in range(3):
        log = simulate(preset("population"), "uniform", users=100, seed=seed)
        found = confounding(log.incentives, log.revenue, state_features(log), users=log.user_index)
        assert not found.confounded and abs(found.amount) < 0.01 and found.revenue > 0.02


def test_propensities_take_confounding_away_where_they_are_right() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=5000)
    chance = 1 / (1 + np.exp(-state))
    paid = (rng.random(5000) < chance).astype(float)
    revenue = state + paid + rng.normal(size=5000)
    propensities = np.where(paid == 1, chance, 1 - chance)
    plain = confounding(paid, revenue, state[:, None])
    assert plain.confounded and plain.amount > 0.1 and plain.revenue > 0.2
    assert not confounding(paid, revenue, state[:, None], propensities=propensities).confounded
    wrong = confounding(paid, revenue, state[:, None], propensities=np.full(5000, 0.5))
    assert wrong.confounded and "The propensities do not make" in wrong.warning
    with pytest.raises(ConfigurationError, match="revenue has 3 rows and amounts 5000"):
        confounding(paid, revenue[:3], state[:, None])
    with pytest.raises(ConfigurationError, match="users: 2 came"):
        confounding(paid, revenue, state[:, None], users=np.arange(5000) % 2)


def test_state_features_are_known_before_the_decision() -> None:
    log = InteractionLog.from_columns(
        Schema(user="u", time="t", incentive="a", revenue="r", categorical=("k",)),
        {"u": [1, 1, 1, 2], "t": [0, 1, 2, 0], "a": [1.0, 2.0, 6.0, 4.0], "r": [9.0, 8.0, 4.0, 7.0],
         "k": np.array(["x", "y", "x", "x"])},
    )  # fmt: skip
    expected = [
        [1, 0, np.nan, np.nan, np.nan, np.nan, 0],
        [0, 1, 1, 1, 9, 9, np.log(2)],
        [1, 0, 2, 1.5, 8, 8.5, np.log(3)],
        [1, 0, np.nan, np.nan, np.nan, np.nan, 0],
    ]
    np.testing.assert_allclose(state_features(log), expected)
    np.testing.assert_allclose(state_features(log, np.array([2])), expected[2:3])


def test_support_says_what_is_missing() -> None:
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, 2000)
    even = LoggedDecisions(actions, np.full(2000, 0.5), np.full((2000, 2), 0.5), np.zeros(2000), np.zeros(2000))
    assert support(even).warnings == () and support(even).effective_sample_size == pytest.approx(2000)
    beyond = replace(even, target=np.tile([0.4, 0.4, 0.2], (2000, 1)))
    assert (
        support(beyond).never == pytest.approx(0.2)
        and "20.0% of what the target would pay" in support(beyond).warnings[0]
    )
    # Half of the states never see action 1, though the log does.
    hidden = np.arange(2000) % 2 == 0
    half = np.where(hidden, 1.0, 0.5)
    partial = replace(
        even, actions=np.where(hidden, 0, actions), propensities=half, target=np.tile([0.0, 1.0], (2000, 1))
    )  # fmt: skip
    assert support(partial).never == 0 and support(partial).unsupported > 0.4
    assert "have no chance in the log" in support(partial).warnings[0]
    assert self_normalized_importance_sampling(partial).abstained
    assert "too small" in support(replace(even, propensities=np.full(2000, 0.25))).warnings[0]
    assert amount_support(np.repeat([0.0, 10.0, 50.0], [20, 20, 3]), np.array([0.0, 10.5, 20.0, 50.0])) == (0.25, 0.25)


def test_evidence_for_the_report(baskets: InteractionLog) -> None:
    some = baskets.select_users(np.arange(0, baskets.users, 16))
    rows = np.arange(0, some.events, 3)
    found = json.loads(json.dumps(log_evidence(some, rows, np.full(len(rows), 99_999.0)), allow_nan=False))
    assert "Support is missing: 100.0%" in found["warnings"][0] and "confounded" in found["warnings"][1]
    assert found["estimates"] == [] and "the log has no propensities" in found["note"]

    log = simulate(preset("calibrated"), "uniform", users=100, seed=0)
    rows = np.flatnonzero(log.position >= 70)
    found = json.loads(json.dumps(log_evidence(log, rows, np.full(len(rows), 5.0)), allow_nan=False))
    assert found["note"] is None and not found["warnings"] and len(found["estimates"]) == 8
    first = found["estimates"][0]
    assert first["horizon"] == 1 and first["cost"] == pytest.approx(5.0) and first["reason"] is None
    assert first["revenue_interval"][0] < first["revenue"] < first["revenue_interval"][1]
    longer = found["estimates"][4]  # five fives in a row have a chance of 11 ** -5
    assert longer["horizon"] == 5 and longer["revenue"] is None and "effective sample size" in longer["reason"]
