"""The ledger, on a reward model that is exact: nothing may be lost there."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch

from goal import IncentiveTokenizer, Policy, PolicyConfig
from goal.config import LoopConfig, ScpoConfig
from goal.data import Data
from goal.evaluation import Sweep, ValueGreedy, ledger, promises, rollout_many, sweep
from goal.log import History, Splits
from goal.reward import PScore, RewardModel, RewardTable
from goal.reward.state import state_config
from goal.simulator import Parameters, preset, simulate
from goal.training import Loop, Scpo, StateSampler

PARAMETERS = dataclasses.replace(preset("calibrated"), horizon=30)
MULTIPLIERS = (0.0, 1.0, 2.0, 3.0)
FATIGUE = np.linspace(0, 6, 1201)


class ExactReward(torch.nn.Module):
    """R and C by backward recursion over a grid of fatigue, read off the features of the pending event."""

    discount, looks_ahead = 0.98, True
    at = RewardModel.at

    def __init__(self, parameters: Parameters, *, promise: float = 1.0) -> None:
        super().__init__()
        self.environment, self.promise = parameters, promise
        self.multipliers = torch.tensor(MULTIPLIERS)
        self.grid = torch.tensor(parameters.levels, dtype=torch.float32)
        amounts = parameters.levels
        logits = parameters.base_logit + parameters.alpha * amounts - parameters.beta * FATIGUE[:, None]
        revenue = parameters.revenue_per_engagement / (1 + np.exp(-logits))
        following = parameters.rho * FATIGUE[:, None] + parameters.eta * amounts
        self.utility = np.zeros((parameters.horizon, len(FATIGUE), len(amounts), len(MULTIPLIERS)))
        for index, multiplier in enumerate(MULTIPLIERS):
            value = np.zeros(len(FATIGUE))
            for step in reversed(range(parameters.horizon)):
                later = np.interp(following, FATIGUE, value)
                self.utility[step, ..., index] = revenue - multiplier * amounts + self.discount * later
                value = self.utility[step, ..., index].max(axis=1)

    def tabulate(self, history: History) -> RewardTable:
        last = history.numeric[torch.arange(len(history)), history.lengths - 1].numpy()
        step = np.rint(last[:, 2] * self.environment.horizon).astype(int)
        place = np.rint(last[:, 0] / (FATIGUE[1] - FATIGUE[0])).astype(int)
        cost = self.grid[None, :, None].expand(len(step), -1, len(MULTIPLIERS))
        utility = torch.from_numpy(self.utility[step, place]).float() * self.promise
        return RewardTable(utility + self.multipliers * cost, cost, torch.ones(len(step), 1, 1))


@pytest.fixture(scope="module")
def swept() -> Sweep:
    greedy = ValueGreedy(cast(RewardModel, ExactReward(PARAMETERS)), window=1)
    return sweep(greedy, PARAMETERS, MULTIPLIERS, users=1000, seed=5, roi_target=3.0)


def test_with_the_exact_value_nothing_is_lost(swept: Sweep) -> None:
    reward = cast(RewardModel, ExactReward(PARAMETERS))
    for row in ledger(reward, PARAMETERS, swept, window=1, seed=5):
        greedy, policy, oracle = row["greedy_value"], row["policy_value"], row["oracle_value"]
        assert greedy is not None and policy is not None and oracle is not None
        assert greedy >= 0.97 * oracle
        assert greedy == pytest.approx(policy) and greedy <= oracle * 1.0001  # the same amounts, and no luck
        assert row["greedy_share"] == pytest.approx(row["policy_share"])
        assert row["realised_value"] == pytest.approx(row["expected_value"], rel=0.02)


def test_a_value_that_promises_too_much_is_found_out(swept: Sweep) -> None:
    reward = cast(RewardModel, ExactReward(PARAMETERS, promise=1.5))
    for row in ledger(reward, PARAMETERS, swept, window=1, seed=5):
        expected, realised = row["expected_value"], row["realised_value"]
        assert expected is not None and realised is not None
        assert expected == pytest.approx(1.5 * realised, rel=0.02)
        assert row["greedy_share"] == pytest.approx(row["policy_share"])  # a common factor changes no choice


def test_promises_in_the_making_are_those_of_each_model() -> None:
    models = [(step, cast(RewardModel, ExactReward(PARAMETERS, promise=share))) for step, share in ((10, 0.5), (20, 1))]
    rows = promises(models, PARAMETERS, MULTIPLIERS[:2], window=1, users=300, seed=5)
    assert [(row["step"], row["multiplier"]) for row in rows] == [(s, m) for s in (10, 20) for m in MULTIPLIERS[:2]]
    for half, whole in zip(rows[:2], rows[2:], strict=True):
        assert half["expected_value"] == pytest.approx(0.5 * whole["expected_value"])
        assert half["realised_value"] == pytest.approx(whole["realised_value"])  # a factor changes no choice
        assert whole["realised_value"] == pytest.approx(whole["expected_value"], rel=0.04)


def test_the_nearest_candidate_decides() -> None:
    reward = ExactReward(PARAMETERS)
    features = torch.tensor([[[1.0, 0.0, 0.5]]]).expand(4, 1, 3)
    nothing = torch.zeros(4, 1)
    history = History(
        features, torch.zeros(4, 1, 0, dtype=torch.int64), nothing, nothing[..., None], torch.ones(4, dtype=torch.int64)
    )
    greedy = ValueGreedy(cast(RewardModel, reward), window=1)
    amounts = greedy.allocate(history, torch.tensor([0.0, 0.4, 1.9, 5.0]))
    utility = reward.utility[15, 200]
    assert amounts.tolist() == [PARAMETERS.levels[utility[:, j].argmax()] for j in (0, 0, 2, 3)]


def test_scpo_on_the_exact_value_reaches_the_oracle() -> None:
    log = simulate(PARAMETERS, users=200, seed=1)
    nothing = np.zeros(0, dtype=np.int64)
    data = Data(log, Splits(np.arange(log.events), nothing, nothing), PARAMETERS, 0)
    tokenizer = IncentiveTokenizer.fit(log.incentives)
    torch.manual_seed(0)
    config = PolicyConfig(
        vocabulary=tuple(tokenizer.values.tolist()),
        numeric_features=3,
        outcomes=log.outcomes.shape[1],
        window=1,
        dimension=32,
        feedforward=64,
        expert_hidden=32,
        max_length=tokenizer.max_length + 1,
        allowed_amounts=data.allowed_amounts,
    )
    policy = Policy(config, data.scaling)
    states = StateSampler(data.windows(data.splits.training, 1), clock=data.clock, horizon=PARAMETERS.horizon)
    settings = ScpoConfig(loop=LoopConfig(steps=120, batch_size=144, learning_rate=4e-3))
    Loop(settings.loop).run(Scpo(policy, cast(RewardModel, ExactReward(PARAMETERS)), states, settings))
    for row in sweep(policy.eval(), PARAMETERS, MULTIPLIERS, users=1000, seed=5, roi_target=3.0).rows:
        value, oracle = row["value"], row["oracle_value"]
        assert value is not None and oracle is not None
        assert value >= 0.97 * oracle, row


def test_the_past_carried_along_is_the_whole_past() -> None:
    parameters = dataclasses.replace(preset("population"), horizon=12)
    log = simulate(parameters, users=30, seed=2)
    nothing = np.zeros(0, dtype=np.int64)
    data = Data(log, Splits(np.arange(log.events), nothing, nothing), parameters, 0)
    shape = PolicyConfig(vocabulary=(1.0,), numeric_features=2, outcomes=2, heads=1)
    torch.manual_seed(0)
    pscore = PScore(state_config(shape, 16, window=64), data.scaling, objectives=log.schema.objectives,
                    clock=data.clock)  # fmt: skip
    with torch.no_grad():  # far from linear, so that the best amount depends on the past
        for weight in pscore.parameters():
            weight.mul_(2)
    reward = RewardModel(pscore, [], grid=torch.from_numpy(data.grid(24)), multipliers=torch.tensor(MULTIPLIERS),
                         discount=0.98, cost_rate=0.0002)  # fmt: skip
    by_window, carried = (
        rollout_many(ValueGreedy(reward, window=window), parameters, MULTIPLIERS, users=20, seed=3, batch_rows=32)
        for window in (64, None)
    )
    for expected, made in zip(by_window, carried, strict=True):
        np.testing.assert_array_equal(made.amounts, expected.amounts)
    assert len(np.unique(np.stack([made.amounts for made in carried]))) > 3
