"""Worlds whose answer is known: what a whole run, small, has to find in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from goal import Policy
from goal.config import (
    LoopConfig,
    NetworkConfig,
    PolicyConfig,
    PretrainingConfig,
    RewardConfig,
    RunConfig,
    ScpoConfig,
)
from goal.constraint import calibrate
from goal.data import Data
from goal.evaluation import expected_revenue, ledger, rollout, sweep
from goal.evaluation.off_policy import (
    LoggedDecisions,
    OffPolicyEstimates,
    doubly_robust,
    self_normalized_importance_sampling,
)
from goal.log import InteractionLog, Schema, Splits, Windows
from goal.pipeline import Run
from goal.results import estimated_per_user
from goal.results.estimates import allocate
from goal.reward import LongHorizonValue, PlannedValue, PScore, RewardModel
from goal.reward.state import state_config
from goal.simulator import Parameters, preset, simulate
from goal.training import Loop, PScoreStage, ValueStage, plan

pytestmark = pytest.mark.xdist_group("worlds")  # one worker learns each of them once
TIRING = dataclasses.replace(preset("calibrated"), horizon=20)
MULTIPLIERS = (0.0, 0.5, 1.0, 2.0, 3.0)


def settings(environment: Path) -> RunConfig:
    return RunConfig(
        environment=str(environment),
        simulated_users=1000,
        threads=1,
        device="cpu",
        network=NetworkConfig(window=4, dimension=32, feedforward=64, expert_hidden=32, dilations=(1, 2)),
        pretraining=PretrainingConfig(loop=LoopConfig(steps=40, batch_size=64)),
        reward=RewardConfig(
            dimension=32,
            value_dimension=64,
            pscore=LoopConfig(steps=400, batch_size=512, learning_rate=4e-3),
            value=LoopConfig(steps=800, batch_size=512, learning_rate=4e-3),
        ),
        scpo=ScpoConfig(loop=LoopConfig(steps=180, batch_size=96, learning_rate=4e-3, log_every=10), pool=4, repeat=1),
    )


@pytest.fixture(scope="module")
def learn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs everything up to the policy, in a world and on a log that may be changed first."""

    @cache
    def learned(parameters: Parameters, change: Callable[[Data], Data] | None = None) -> Run:
        folder = tmp_path_factory.mktemp("world")
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in dataclasses.asdict(parameters).items())
        (folder / "world.toml").write_text('preset = "calibrated"\n[parameters]\n' + "".join(lines))
        run = Run(settings(folder / "world.toml"), folder / "run")
        if change is not None:
            run.data = change(run.data)
        run.run("scpo")
        return run

    return learned


def values(run: Run, parameters: Parameters) -> list[dict]:
    """Rows of a sweep on 500 users, but that revenue is what the amounts bring in expectation: luck is not in it."""
    policy = Policy.from_pretrained(run.folder / "policy").eval()
    swept = sweep(policy, parameters, MULTIPLIERS, users=500, seed=7, roi_target=3.0)
    brought = [float(expected_revenue(made, parameters, seed=7).mean()) for made in swept.rollouts]
    return [
        {**row, "rev": revenue, "value": revenue - row["multiplier"] * row["cost"]}
        for row, revenue in zip(swept.rows, brought, strict=True)
    ]


def amounts_paid(run: Run, states: Data) -> np.ndarray:
    """Amounts `(multipliers, n)` at states of the log, whichever world they come from."""
    policy = Policy.from_pretrained(run.folder / "policy").eval()
    windows = states.windows(states.splits.training[::97], policy.config.window)
    history = windows.batch(np.arange(len(windows)))
    return np.stack([policy.allocate(history, torch.full((len(history),), m)).numpy() for m in MULTIPLIERS])


def test_where_nobody_tires_the_myopic_optimum_is_found(learn: Callable[..., Run]) -> None:
    world = dataclasses.replace(TIRING, eta=0.0)
    run = learn(world)
    for row, paid in zip(values(run, world), amounts_paid(run, run.data), strict=True):
        immediate = world.expected_revenue(world.levels, 0.0) - row["multiplier"] * world.cost(world.levels)
        assert row["oracle_value"] == pytest.approx(immediate.max(), abs=1e-9)
        assert row["value"] >= 0.97 * row["oracle_value"], row
        assert np.mean(immediate[world.nearest(paid)]) >= immediate.max() - 0.03 * abs(immediate.max())


def test_calibration_from_the_log_alone_holds_in_the_simulator(learn: Callable[..., Run]) -> None:
    """Without fatigue the states of the log are those that the policy meets: the reward model's word can be kept."""
    world, target = dataclasses.replace(TIRING, eta=0.0), 3.5
    run = learn(world)
    policy = Policy.from_pretrained(run.folder / "policy").eval()
    log = simulate(world, users=300, seed=99)
    nothing = np.zeros(0, dtype=np.int64)
    alone = Data(log, Splits(nothing, np.arange(log.events), nothing), None, 0)
    evaluate, baseline = estimated_per_user(run.reward, policy, alone)
    found = calibrate(evaluate, run.multipliers, roi_target=target, baseline=baseline, refine=0.05)
    assert found.feasible
    true = rollout(policy, world, found.multiplier, users=3000, seed=5)
    roi = true.revenue.sum() / true.cost.sum()
    assert roi == pytest.approx(found.roi, rel=0.03)
    assert roi > 0.98 * target


@pytest.mark.parametrize("estimator", [self_normalized_importance_sampling, doubly_robust])
def test_calibration_by_off_policy_estimates_holds_in_the_simulator(
    estimator: Callable[[LoggedDecisions], OffPolicyEstimates], learn: Callable[..., Run]
) -> None:
    world, target = dataclasses.replace(TIRING, eta=0.0), 3.5
    run = learn(world)
    policy = Policy.from_pretrained(run.folder / "policy").eval()
    log = simulate(world, "uniform", users=1000, seed=98)
    windows = Windows(log, np.arange(log.events), length=policy.config.window)

    def evaluate(multiplier: float) -> tuple[np.ndarray, np.ndarray]:
        paid = np.eye(len(world.levels))[world.nearest(allocate(policy, windows, multiplier))]
        decisions = LoggedDecisions.from_log(log, paid, amounts=world.levels, horizon=1)
        revenue, cost = estimator(decisions).per_user.T
        return revenue, cost

    found = calibrate(evaluate, run.multipliers, roi_target=target, refine=0.1, confidence=0.9)
    assert found.feasible
    true = rollout(policy, world, found.multiplier, users=3000, seed=5)
    roi = true.revenue.sum() / true.cost.sum()
    assert roi == pytest.approx(found.roi, rel=0.03)
    assert roi > 0.98 * target


def test_where_incentives_do_nothing_nobody_is_paid(learn: Callable[..., Run]) -> None:
    world = dataclasses.replace(TIRING, alpha=0.0, base_logit=-1.0)
    run = learn(world)
    for row, paid in zip(values(run, world)[1:], amounts_paid(run, run.data)[1:], strict=True):
        assert row["cost"] == 0.0, row
        assert (paid == 0.0).all()


def test_the_papers_world_is_found_to_pay_for_nothing(learn: Callable[..., Run]) -> None:
    """The log almost never shows that: its behaviours pay, and a payment tires for long."""
    world = dataclasses.replace(preset("paper"), horizon=40)
    for row in values(learn(world), world):
        # Half an engagement a step; at multiplier 0 the last steps may be paid for.
        assert row["value"] >= 0.5 - 1e-3, row
        assert row["multiplier"] == 0 or row["cost"] < 0.01, row


def test_little_is_lost_between_the_exact_value_and_the_policy(learn: Callable[..., Run]) -> None:
    """The argmax of what was planned on what was learned is near the optimum, and SCPO's policy near the argmax."""
    run = learn(TIRING)
    policy = Policy.from_pretrained(run.folder / "policy").eval()
    swept = sweep(policy, TIRING, MULTIPLIERS, users=500, seed=7, roi_target=3.0)
    for row in ledger(run.reward, TIRING, swept, window=1, seed=7):
        promised, oracle, greedy, paid = (
            row[name] for name in ("expected_value", "oracle_value", "greedy_value", "policy_value")
        )
        assert promised is not None and greedy is not None and paid is not None and oracle is not None
        # Errors of expected revenue are the same in money under every multiplier, however little is left of the value.
        assert promised / TIRING.horizon == pytest.approx(greedy, abs=0.05 * swept.rows[0]["oracle_value"])
        assert greedy >= 0.95 * oracle
        assert paid >= 0.95 * greedy


def assert_alike(run: Run, other: Run) -> None:
    """In the world of the first the second pays nearly always the same, and where it does not, as well."""
    same = amounts_paid(run, run.data) == amounts_paid(other, run.data)
    assert (same.mean(axis=1) > 0.8).all()
    for row, as_well in zip(values(run, TIRING), values(other, TIRING), strict=True):
        assert as_well["value"] > row["value"] - 0.1 * (row["oracle_value"] - row["reference_value"])


def test_decisions_do_not_depend_on_the_currency(learn: Callable[..., Run]) -> None:
    cents = dataclasses.replace(
        TIRING, revenue_per_engagement=100 * TIRING.revenue_per_engagement, cost_rate=100.0, currency="cents"
    )
    assert_alike(learn(TIRING), learn(cents))


def with_a_subscription(data: Data) -> Data:
    return dataclasses.replace(data, log=dataclasses.replace(data.log, revenue=data.log.revenue + 5.0))


def test_decisions_do_not_depend_on_what_comes_in_anyway(learn: Callable[..., Run]) -> None:
    assert_alike(learn(TIRING), learn(TIRING, with_a_subscription))


LAG = 8


def late_log(users: int, steps: int) -> InteractionLog:
    """Paying 1 now raises the chance of 10 from .1 to .6 eight decisions later, and does nothing else."""
    generator = np.random.default_rng(0)
    paid = generator.integers(0, 2, (users, steps)).astype(float)
    late = np.pad(paid, ((0, 0), (LAG, 0)))[:, :steps]
    revenue = 10.0 * (generator.random((users, steps)) < 0.1 + 0.5 * late)
    schema = Schema(user="user", time="time", incentive="paid", revenue="revenue", cost_rate=1.0)
    user, time = np.divmod(np.arange(users * steps), steps)
    columns = {"user": user, "time": time.astype(float), "paid": paid.ravel(), "revenue": revenue.ravel()}
    return InteractionLog.from_columns(schema, columns)


@pytest.mark.parametrize("window", [16, 1])
def test_an_effect_that_comes_late_is_seen_in_the_past_alone(window: int) -> None:
    log = late_log(400, 60)
    nothing = np.zeros(0, dtype=np.int64)
    data = Data(log, Splits(np.arange(log.events), nothing, nothing), None, 0)
    config = PolicyConfig(vocabulary=(1.0,), window=window, dimension=32, dilations=(1, 2, 4))
    settings = RewardConfig(
        pscore=LoopConfig(steps=400, batch_size=1024, learning_rate=4e-3),
        value=LoopConfig(steps=1000, batch_size=512, learning_rate=4e-3),
    )
    torch.manual_seed(0)
    pscore = PScore(state_config(config, 32, window=config.window), data.scaling, bins=data.outcome_bins)
    stage = PScoreStage(pscore, log, data.splits.training, settings)
    Loop(settings.pscore).run(stage)
    stage.finish()
    assert bool(pscore.state.uses_history) is (window > 1)
    multipliers = torch.tensor([0.0, 1.0, 3.0, 6.0])
    size, count = pscore.state.size, len(multipliers)
    values = [
        LongHorizonValue(size, data.scaling, multipliers=tuple(multipliers.tolist()), hidden=64, horizon=None)
        for _ in range(2 if window > 1 else 0)
    ]
    planned = None if window > 1 else PlannedValue(size, amounts=2, multipliers=count, horizon=None)
    reward = RewardModel(pscore, values, planned=planned, grid=torch.tensor([0.0, 1.0]), multipliers=multipliers,
                         discount=0.98, cost_rate=1.0)  # fmt: skip
    if planned is not None:
        plan(reward, log, data.splits.training, generator=torch.Generator().manual_seed(0))
    else:
        stage = ValueStage(reward, log, data.splits.training, settings, horizon=None)
        Loop(settings.value).run(stage)
        stage.finish()
    rows = np.flatnonzero((log.time >= 2 * LAG) & (log.time < 40))[::7]
    history = data.windows(data.splits.training, window).batch(rows)
    expected = pscore.predict(history, torch.tensor([0.0])).detach().numpy()[:, 0]
    late = log.incentives[rows - LAG] == 1
    table = reward.tabulate(history)
    utility = table.reward - multipliers * table.cost
    gain = (utility[:, 1] - utility[:, 0]).mean(dim=0)
    if window == 1:
        assert expected.std() < 0.01
        torch.testing.assert_close(gain, -multipliers, rtol=0, atol=0.1)
        return
    assert expected[late].mean() == pytest.approx(6, abs=0.5) and expected[~late].mean() == pytest.approx(1, abs=0.3)
    truth = 5 * 0.98**LAG - multipliers
    torch.testing.assert_close(gain, truth, rtol=0, atol=0.6)
    assert ((utility[:, 1] > utility[:, 0]) == (truth > 0)).float().mean() > 0.95
