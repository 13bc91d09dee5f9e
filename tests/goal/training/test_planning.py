"""Values planned from the last step back, beside exact recursions."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from goal.config import PolicyConfig
from goal.data import Data
from goal.log import FeatureScaling, InteractionLog, Splits, Windows
from goal.reward import PlannedValue, PScore, RewardModel
from goal.reward.state import state_config
from goal.simulator import Parameters, preset, simulate
from goal.training import MetricsFile, plan
from goal.training.metrics import explain

PARAMETERS = dataclasses.replace(preset("calibrated"), horizon=30)
MULTIPLIERS = (0.0, 1.0, 2.5)


class Known(PScore):
    """What a payment brings now is the truth, so that only planning can err."""

    world: Parameters

    def _chance(self, states: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        features = self.state.past.features
        fatigue = (states[:, -3] * features.std[0] + features.mean[0])[:, None]
        p = self.world
        return torch.sigmoid(p.base_logit + p.alpha * amounts - p.beta * fatigue)

    def expected(self, states, amounts, name="revenue"):
        return self.world.revenue_per_engagement * self._chance(states, amounts)

    def chances(self, states, amounts):
        chance = self._chance(states, amounts)
        return torch.stack([1 - chance, chance], dim=-1)


@cache
def log_of(parameters: Parameters, users: int = 300) -> InteractionLog:
    return simulate(parameters, users=users, seed=3)


def untrained(
    log: InteractionLog, parameters: Parameters, *, discount: float = 1.0, clocked: bool = True
) -> RewardModel:
    rows = np.arange(log.events)
    torch.manual_seed(0)
    shape = PolicyConfig(vocabulary=(1.0,), numeric_features=3, outcomes=2, heads=1)
    data = Data(log, Splits(rows, rows[:0], rows[:0]), None, 0)
    pscore = Known(state_config(shape, 16, window=1), FeatureScaling.fit(log, rows), objectives=log.schema.objectives,
                   bins=data.outcome_bins, clock=data.clock)  # fmt: skip
    pscore.world = parameters
    horizon = parameters.horizon if clocked else None
    grid = torch.tensor(parameters.levels, dtype=torch.float32)
    planned = PlannedValue(pscore.state.size, amounts=len(grid), multipliers=len(MULTIPLIERS), horizon=horizon)
    return RewardModel(pscore, [], planned=planned, grid=grid, multipliers=torch.tensor(MULTIPLIERS), discount=discount,
                       cost_rate=1.0, clock=data.clock if clocked else None)  # fmt: skip


def planned(log: InteractionLog, parameters: Parameters, *, seed: int = 0, **how) -> RewardModel:
    reward = untrained(log, parameters, **how)
    plan(reward, log, np.arange(log.events), generator=torch.Generator().manual_seed(seed))
    return reward


def exact(parameters: Parameters, discount: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Utility-to-go and cost-to-go `(n, fatigue, G)` with so many steps left after the present one."""
    fatigue = np.linspace(0, parameters.max_fatigue, 2001)
    amounts = parameters.levels
    revenue = parameters.expected_revenue(amounts, fatigue[:, None])
    following = parameters.rho * fatigue[:, None] + parameters.eta * amounts
    utilities, costs = [], []
    for multiplier in MULTIPLIERS:
        value, cost = np.zeros(len(fatigue)), np.zeros(len(fatigue))
        for _ in range(steps):
            now = revenue - multiplier * amounts + discount * np.interp(following, fatigue, value)
            best = now.argmax(axis=1)
            value = now.max(axis=1)
            later = amounts + discount * np.interp(following, fatigue, cost)
            cost = later[np.arange(len(fatigue)), best]
        utilities.append(np.interp(following, fatigue, value))
        costs.append(np.interp(following, fatigue, cost))
    return np.stack(utilities), np.stack(costs)


def states_of(reward: RewardModel, log: InteractionLog) -> tuple[torch.Tensor, np.ndarray]:
    """Some states of the log, and their fatigue."""
    rows = np.arange(3, log.events, 97)
    history = Windows(log, rows, length=1).batch(np.arange(len(rows)))
    return reward.pscore.state.pending(history), log.numeric[rows, 0]


@pytest.mark.parametrize("left", [1, 8, 25])
@torch.no_grad()
def test_with_a_clock_values_are_those_of_the_exact_recursion(left: int) -> None:
    log = log_of(PARAMETERS)
    reward = planned(log, PARAMETERS)
    states, fatigue = states_of(reward, log)
    clock = torch.full((len(states),), 1 - (left + 1) / PARAMETERS.horizon)
    utility, cost = (part.numpy() for part in reward.to_go(states, clock))
    place = np.rint(fatigue / PARAMETERS.max_fatigue * 2000).astype(int)
    true_utility, true_cost = (part[:, place].transpose(1, 2, 0) for part in exact(PARAMETERS, 1.0, left))
    # What amounts differ by decides: it is met to a hundredth of what the most costs later.
    off = (utility - utility.mean(axis=1, keepdims=True)) - (true_utility - true_utility.mean(axis=1, keepdims=True))
    assert np.abs(off).mean() < 0.01 * np.ptp(true_utility, axis=1).max()
    assert np.abs(utility - true_utility).mean() < 0.003 * true_utility.max()
    # Costs jump where amounts are nearly equal; on average they are met.
    np.testing.assert_allclose(cost.mean(axis=(0, 1)), true_cost.mean(axis=(0, 1)), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_nothing_follows_the_last_step() -> None:
    log = log_of(PARAMETERS)
    reward = planned(log, PARAMETERS)
    states, _ = states_of(reward, log)
    last = torch.full((len(states),), 1 - 1 / PARAMETERS.horizon)
    assert not any(part.any() for part in reward.to_go(states, last))


@torch.no_grad()
def test_without_a_clock_the_sum_goes_on_for_ever() -> None:
    log = log_of(PARAMETERS)
    endless = dataclasses.replace(log, schema=dataclasses.replace(log.schema, horizon=None, clock=None))
    reward = planned(endless, PARAMETERS, discount=0.9, clocked=False)
    states, fatigue = states_of(reward, log)
    utility, _ = reward.to_go(states, None)
    place = np.rint(fatigue / PARAMETERS.max_fatigue * 2000).astype(int)
    true = exact(PARAMETERS, 0.9, 200)[0][:, place].transpose(1, 2, 0)
    assert np.abs(utility.numpy() - true).mean() < 0.02 * true.max()


@torch.no_grad()
def test_looking_no_further_than_some_steps_is_being_so_near_the_end() -> None:
    log = log_of(PARAMETERS)
    reward = planned(log, PARAMETERS)
    assert reward.planned is not None
    states, _ = states_of(reward, log)
    start, near = torch.zeros(len(states)), torch.full((len(states),), 1 - 6 / PARAMETERS.horizon)
    whole = reward.to_go(states, near)
    reward.planned.lookahead = 5
    for part, expected in zip(reward.to_go(states, start), whole, strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(reward.to_go(states, near)[0], whole[0])
    reward.planned.lookahead = 0
    assert not reward.to_go(states, start)[0].any()


@torch.no_grad()
def test_a_plan_is_saved_and_depends_on_its_seed_alone() -> None:
    log = log_of(PARAMETERS, users=40)
    first, again, other = (planned(log, PARAMETERS, seed=seed) for seed in (0, 0, 1))
    restored = untrained(log, PARAMETERS)
    restored.load_state_dict(copy.deepcopy(first.state_dict()))
    states, _ = states_of(first, log)
    clock = torch.full((len(states),), 0.5)
    values = [model.to_go(states, clock)[0] for model in (first, again, restored, other)]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[3])


@torch.no_grad()
def test_no_state_is_worth_more_than_any_that_was_planned_from() -> None:
    log = log_of(PARAMETERS, users=40)
    reward = planned(log, PARAMETERS)
    states, _ = states_of(reward, log)
    clock = torch.full((len(states),), 0.3)
    far, _ = reward.to_go(50 * states, clock)
    near, _ = reward.to_go(states, clock)
    spread = near.amax(dim=(0, 1)) - near.amin(dim=(0, 1))
    assert (far.amax(dim=(0, 1)) < near.amax(dim=(0, 1)) + spread).all() and far.isfinite().all()


def test_its_metrics_say_how_well_values_fit(tmp_path: Path) -> None:
    log = log_of(PARAMETERS)
    reward, metrics = untrained(log, PARAMETERS), MetricsFile(tmp_path / "metrics.jsonl")
    plan(reward, log, np.arange(log.events), generator=torch.Generator().manual_seed(0), metrics=metrics)
    lines = metrics.read()
    assert [line["step"] for line in lines] == [*range(0, 30, 3), 29]
    assert max(line["fit_error"] for line in lines) < 0.05
    assert all(explain("value", name) for name in lines[0] if name not in ("stage", "step"))
    assert lines[-1]["utility_to_go"] > 10 * lines[0]["utility_to_go"]


@pytest.mark.parametrize("decisions", [1, 3])
def test_a_plan_from_next_to_nothing_is_finite(decisions: int, tmp_path: Path) -> None:
    log = log_of(PARAMETERS, users=40)
    for clocked, discount in ((True, 1.0), (False, 0.0)):
        reward, metrics = untrained(log, PARAMETERS, clocked=clocked, discount=discount), MetricsFile(tmp_path / "m")
        plan(reward, log, np.arange(decisions + 1), generator=torch.Generator(), metrics=metrics)
        assert all(value.isfinite().all() for name, value in reward.state_dict().items() if "spread" not in name)
        assert all(np.isfinite(list(line.values())[2:]).all() for line in metrics.read())


def test_where_nothing_follows_anything_there_is_no_plan() -> None:
    log = log_of(PARAMETERS, users=40)
    with pytest.raises(ValueError, match="no decision of the log is followed"):
        plan(untrained(log, PARAMETERS), log, log.offsets[:-1], generator=torch.Generator())
