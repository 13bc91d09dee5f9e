"""Rollouts against the log of the same users and the environment's own records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from goal.errors import ConfigurationError
from goal.evaluation import Constant, OraclePolicy, Uniform, expected_revenue, rollout, rollout_many
from goal.log import History, Windows
from goal.simulator import load, preset, simulate
from goal.simulator.oracle import solve_users

SEED = 3


@dataclass
class Config:
    window: int


class Replay:
    """Pays what a log paid and keeps the histories that it was shown."""

    def __init__(self, log, window: int, users: int):
        self.amounts = log.incentives.reshape(users, -1)
        self.config = Config(window)
        self.histories: list[History] = []
        self.multipliers: list[torch.Tensor] = []

    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        history.validate()
        # In inference mode and over live buffers: keep a copy.
        self.histories.append(History(*(tensor.clone() for tensor in vars(history).values())))
        self.multipliers.append(multiplier.clone())
        step = len(self.histories) - 1
        return torch.from_numpy(self.amounts[:, step].copy())


class Reactive:
    """Pays by what it sees, so that a wrong history changes what happens; its amounts are off the levels."""

    config = Config(5)

    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        seen = history.outcomes[..., 1].sum(1) + history.incentives.mean(1) + history.numeric[..., -1].sum(1)
        return ((seen * 3.7 + multiplier) % 10).double()


@pytest.fixture(scope="module", params=["calibrated", "population"])
def parameters(request):
    return preset(request.param)


@pytest.mark.parametrize("window", [1, 7, 150])
def test_the_policy_sees_what_a_log_of_the_same_users_holds(parameters, window: int):
    users = 6
    log = simulate(parameters, "uniform", users=users, seed=SEED)
    replay = Replay(log, window, users)
    made = rollout(replay, parameters, 1.5, users=users, seed=SEED)
    assert np.array_equal(made.amounts, log.incentives.reshape(users, -1))
    assert np.array_equal(made.revenue, log.revenue.reshape(users, -1))
    assert np.array_equal(made.cost, log.cost.reshape(users, -1))
    assert np.array_equal(made.engaged, log.objectives[:, 0].reshape(users, -1) > 0)
    for step, history in enumerate(replay.histories):
        rows = np.arange(users) * parameters.horizon + step
        expected = Windows(log, rows, length=window).batch(np.arange(users))
        length = int(expected.lengths[0])
        assert length == history.window == min(step + 1, window)
        for name, tensor in vars(history).items():
            other = getattr(expected, name)
            other = other if name == "lengths" else other[:, :length]
            assert torch.equal(tensor, other), (name, step)
    assert all((multiplier == 1.5).all() and len(multiplier) == users for multiplier in replay.multipliers)


def test_the_window_is_sixteen_where_the_policy_has_no_setting(parameters):
    widths = []

    class Plain:
        def allocate(self, history, multiplier):
            widths.append(history.window)
            return torch.zeros(len(history), dtype=torch.float64)

    rollout(Plain(), parameters, 0.0, users=2, seed=0)
    assert widths == [min(step + 1, 16) for step in range(parameters.horizon)]


def test_batches_and_multipliers_in_one_call_change_nothing(parameters):
    multipliers = (0.0, 1.25, 3.0)
    together = rollout_many(Reactive(), parameters, multipliers, users=11, seed=SEED, batch_rows=4)
    for multiplier, made in zip(multipliers, together, strict=True):
        alone = rollout(Reactive(), parameters, multiplier, users=11, seed=SEED)
        assert made.multiplier == multiplier
        for name in ("revenue", "cost", "amounts", "engaged", "arrivals"):
            assert np.array_equal(getattr(made, name), getattr(alone, name)), name
    assert not np.array_equal(together[0].amounts, together[1].amounts)
    assert np.isin(together[0].amounts, parameters.levels).all()
    assert np.array_equal(together[0].cost, parameters.cost(together[0].amounts))


def test_users_and_luck_depend_on_the_seed_alone(parameters):
    first, again, other = (
        rollout(Constant(parameters.levels[3]), parameters, 0.0, users=50, seed=seed) for seed in (1, 1, 2)
    )
    assert np.array_equal(first.revenue, again.revenue)
    assert not np.array_equal(first.revenue, other.revenue)
    more = rollout(Constant(parameters.levels[3]), parameters, 0.0, users=60, seed=1)
    assert np.array_equal(more.revenue[:50], first.revenue)


def test_the_stream_is_in_the_order_of_time(parameters):
    made = rollout(Uniform(parameters.levels, seed=0), parameters, 0.0, users=20, seed=SEED)
    events = sorted(
        (made.arrivals[user] + step, user, step) for user in range(20) for step in range(parameters.horizon)
    )
    stream = made.stream()
    assert stream.revenue.tolist() == [made.revenue[user, step] for _, user, step in events]
    assert stream.cost.tolist() == [made.cost[user, step] for _, user, step in events]
    assert (made.arrivals >= 0).all() and (made.arrivals < parameters.horizon).all()
    assert np.ptp(made.arrivals) > parameters.horizon / 2


def test_per_user_means_average_to_the_figures_per_step(parameters):
    made = rollout(Constant(parameters.levels[2]), parameters, 0.0, users=9, seed=SEED)
    revenue, cost = made.per_user()
    assert revenue.shape == cost.shape == (9,)
    assert revenue.mean() == pytest.approx(made.revenue.mean())
    assert cost.mean() == pytest.approx(made.cost.mean())


def test_the_oracle_reaches_its_own_promise():
    parameters = preset("calibrated")
    policy = OraclePolicy()
    made = rollout(policy, parameters, 2.0, users=3000, seed=SEED)
    solved = solve_users(parameters, 2.0, users=3000, seed=SEED)
    per_user_revenue, per_user_cost = made.per_user()
    assert per_user_cost.mean() == pytest.approx(solved.cost)
    error = per_user_revenue.std() / np.sqrt(3000)
    assert per_user_revenue.mean() == pytest.approx(solved.revenue, abs=4 * error)


def test_expected_revenue_is_what_the_oracle_counts_and_what_comes_in_on_average(parameters):
    made = rollout(OraclePolicy(), parameters, 1.0, users=400, seed=SEED)
    expected = expected_revenue(made, parameters, seed=SEED)
    solved = solve_users(parameters, 1.0, users=400, seed=SEED)
    np.testing.assert_allclose(expected, solved.user_revenue, rtol=1e-9)
    error = (made.revenue.mean(axis=1) - expected).std() / np.sqrt(400)
    assert made.revenue.mean() == pytest.approx(expected.mean(), abs=4 * error)


def test_the_oracle_knows_each_user_of_a_population(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('preset = "population"\n[parameters]\nhorizon = 12\n')
    parameters = load(path)
    made = rollout(OraclePolicy(), parameters, 1.0, users=40, seed=SEED)
    solved = solve_users(parameters, 1.0, users=40, seed=SEED)
    assert np.array_equal(made.amounts, solved.plan)


def test_a_policy_on_a_device_gets_its_history_there():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.amount = torch.nn.Parameter(torch.tensor(2.0))

        def allocate(self, history, multiplier):
            assert history.device == self.amount.device == multiplier.device
            return self.amount.double().expand(len(history))

    made = rollout(Module(), preset("calibrated"), 0.0, users=2, seed=0)
    assert (made.amounts == 2.0).all()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda history, multiplier: torch.zeros(len(history), 1), r"returned \(4, 1\)"),
        (lambda history, multiplier: [0.0] * len(history), "returned list"),
        (lambda history, multiplier: torch.full((len(history),), -1.0), "-1"),
    ],
)
def test_a_policy_that_answers_wrongly_is_named(policy, message: str):
    class Wrong:
        allocate = staticmethod(policy)

    with pytest.raises(ConfigurationError, match=message):
        rollout(Wrong(), preset("calibrated"), 0.0, users=4, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multipliers": ()}, "multipliers"),
        ({"multipliers": (-1.0,)}, "multipliers"),
        ({"multipliers": (float("nan"),)}, "multipliers"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"users": 0}, "users"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str):
    arguments = {"multipliers": (0.0,), "users": 4, "seed": 0} | change
    with pytest.raises(ConfigurationError, match=message):
        rollout_many(Constant(0.0), preset("calibrated"), arguments.pop("multipliers"), **arguments)
