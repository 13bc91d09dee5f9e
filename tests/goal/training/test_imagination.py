"""States that the policy brings about itself, imagined."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from goal import Policy
from goal.config import LoopConfig, ScpoConfig
from goal.data import Data
from goal.log import History
from goal.reward import PScore, RewardModel
from goal.reward.state import state_config
from goal.training import Scpo, StateSampler, Transitions
from goal.training.imagination import ImaginedStates

from .conftest import tiny_config

MULTIPLIERS = torch.tensor([0.0, 1.0, 4.0])


def assert_equal(one: History, other: History) -> None:
    for field in dataclasses.fields(History):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.fixture
def reward(data: Data, tokenizer) -> RewardModel:
    torch.manual_seed(0)
    config = state_config(tiny_config(data, tokenizer), 16, window=8)
    pscore = PScore(config, data.scaling, objectives=data.schema.objectives, clock=data.clock)
    return RewardModel(
        pscore, [], grid=torch.arange(11.0), multipliers=MULTIPLIERS, discount=0.9, cost_rate=1.0, clock=data.clock
    )


@pytest.fixture
def transitions(data: Data, reward: RewardModel) -> Transitions:
    return Transitions(reward, data.log, data.splits.training)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_one_event_on_a_window_is_that_of_the_next_event(length: int, data: Data) -> None:
    windows = data.windows(data.splits.training, length)
    rows = np.array([0, 2, 3, 4, 60, 150])
    before, after, log = windows.batch(rows), windows.batch(rows + 1), data.log
    assert (before.lengths == length).any() and (length == 1 or (before.lengths < length).any())
    columns = (log.incentives[rows], log.outcomes[rows], log.numeric[rows + 1], log.categorical[rows + 1])
    followed = before.followed_by(*(torch.from_numpy(column) for column in columns))
    followed.validate()
    assert_equal(followed, after)
    assert_equal(before, windows.batch(rows))
    both = History.cat([before, after])
    assert_equal(both.select(slice(6, None)), after)


def test_the_policy_pays_what_is_imagined(data: Data, policy: Policy, transitions: Transitions) -> None:
    policy = policy.eval()
    imagined = ImaginedStates(transitions, MULTIPLIERS, count=30, steps=10**9, length=8)
    generator = torch.Generator().manual_seed(0)
    before = imagined.draw(policy, generator)
    assert_equal(before, data.windows(transitions.rows, 8).batch(imagined.decisions))  # all of them begin
    multipliers, decisions = imagined.multipliers.clone(), imagined.decisions.clone()
    assert set(multipliers.tolist()) == set(MULTIPLIERS.tolist())
    after = imagined.draw(policy, generator)
    after.validate()
    goes_on = imagined.decisions == decisions + 1
    assert 20 < goes_on.sum() <= 30
    rows, last = torch.arange(30), after.lengths - 2
    paid = policy.allocate(before.last(policy.config.window), multipliers).float()
    assert torch.equal(after.incentives[rows, last][goes_on], paid[goes_on])
    known = {tuple(outcome) for outcome in data.log.outcomes.tolist()}
    assert {tuple(outcome) for outcome in after.outcomes[rows, last][goes_on].tolist()} <= known
    # The clock goes on by a step; fatigue is moved by what was paid instead of what the log says.
    clock = after.numeric[rows, after.lengths - 1, data.clock] - before.numeric[rows, before.lengths - 1, data.clock]
    torch.testing.assert_close(clock[goes_on], torch.full_like(clock[goes_on], 0.01), rtol=0, atol=1e-3)
    logged = torch.from_numpy(data.log.incentives[transitions.rows[decisions]]).float()
    following = torch.from_numpy(data.log.numeric[transitions.rows[decisions] + 1, 0])
    moved = after.numeric[rows, after.lengths - 1, 0] - following
    more = goes_on & (paid > logged + 2)
    assert more.any() and (moved[more] > 0).all()


def test_what_was_paid_in_a_trajectory_stays_in_its_features(data: Data, transitions: Transitions) -> None:
    """Fatigue becomes .9 of itself and .05 of what is paid, whatever the log paid at those decisions."""
    payer = SimpleNamespace(
        config=SimpleNamespace(window=1), allocate=lambda history, multiplier: torch.full((len(history),), 7.0)
    )
    imagined = ImaginedStates(transitions, MULTIPLIERS, count=60, steps=10**9, length=4)
    generator = torch.Generator().manual_seed(0)

    def fatigue() -> torch.Tensor:
        history = imagined.draw(payer, generator)  # pyright: ignore[reportArgumentType]
        return history.numeric[torch.arange(60), history.lengths - 1, 0]

    expected, decisions = fatigue(), imagined.decisions.clone()
    for _ in range(12):
        expected, found = 0.9 * expected + 0.05 * 7, fatigue()
    goes_on = imagined.decisions == decisions + 12
    assert goes_on.sum() > 30
    torch.testing.assert_close(found[goes_on], expected[goes_on], rtol=0, atol=0.05)


def test_a_trajectory_lasts_as_long_as_told_and_no_longer_than_the_log(
    policy: Policy, transitions: Transitions
) -> None:
    imagined = ImaginedStates(transitions, MULTIPLIERS, count=400, steps=5, length=4)
    generator = torch.Generator().manual_seed(0)
    imagined.draw(policy.eval(), generator)
    ended = []
    for _ in range(20):
        expected = imagined.decisions + 1
        imagined.draw(policy, generator)
        ended.append((imagined.decisions != expected).float().mean())
    assert torch.stack(ended).mean() == pytest.approx(0.2 + 0.8 / 99, abs=0.03)  # users have 99 decisions with a next


def make(policy: Policy, reward: RewardModel, transitions: Transitions, data: Data, **changes: object) -> Scpo:
    config = dataclasses.replace(ScpoConfig(loop=LoopConfig(steps=5, batch_size=24)), **changes)
    windows = data.windows(data.splits.training, 8)
    states = StateSampler(windows, clock=data.clock, horizon=data.schema.horizon)
    return Scpo(policy, reward, states, config, transitions=transitions)


@pytest.mark.parametrize(("rollout", "share", "own"), [("exact", 0.5, 32), ("exact", 1.0, 64), ("shared", 0.5, 4)])
def test_a_share_of_the_states_is_the_policys_own(
    rollout: str, share: float, own: int, data: Data, policy: Policy, reward: RewardModel, transitions: Transitions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stage = make(policy, reward, transitions, data, rollout=rollout, imagined=share, most_tokens=10**6)
    assert stage.imagined is not None and len(stage.imagined.decisions) == own
    met: list[History] = []
    tabulate = reward.tabulate
    monkeypatch.setattr(reward, "tabulate", lambda history: met.append(history) or tabulate(history))
    list(stage.losses(torch.Generator().manual_seed(0), 0.0))
    assert len(met[0]) == round(own / share)
    met[0].validate()


def test_nothing_is_imagined_where_no_share_is_asked_for(
    data: Data, policy: Policy, reward: RewardModel, transitions: Transitions
) -> None:
    stage = make(policy, reward, transitions, data, imagined=0.0)
    assert stage.imagined is None and stage.module is policy


def test_a_checkpoint_holds_what_is_imagined(
    data: Data, policy: Policy, reward: RewardModel, transitions: Transitions
) -> None:
    stage, generator = make(policy, reward, transitions, data), torch.Generator().manual_seed(0)
    for _ in range(3):
        stage.draw(generator)
    state, luck = stage.module.state_dict(), generator.get_state()
    torch.manual_seed(1)
    again = make(Policy(policy.config, data.scaling), reward, transitions, data)
    again.module.load_state_dict(state)
    expected = stage.draw(generator)[0]
    generator.set_state(luck)
    assert_equal(again.draw(generator)[0], expected)
