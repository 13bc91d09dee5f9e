"""What an amount does to the next event's features, and value learned at amounts that nobody logged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from goal import IncentiveTokenizer
from goal.config import LoopConfig, RewardConfig
from goal.data import Data
from goal.log import FeatureScaling, InteractionLog, Windows
from goal.reward import LongHorizonValue, PlannedValue, PScore, RewardModel
from goal.reward.state import state_config
from goal.simulator import preset, simulate
from goal.training import Loop, ValueStage, plan
from goal.training.effects import AmountEffects

from .conftest import tiny_config

PARAMETERS = preset("calibrated")


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return simulate(PARAMETERS, users=60, seed=3)


def effects_of(log: InteractionLog) -> tuple[AmountEffects, np.ndarray]:
    rows = np.arange(log.events)
    next_rows = Windows(log, rows, length=1).successors().row
    return AmountEffects(log, rows, next_rows, PARAMETERS.levels), next_rows


def with_numeric(log: InteractionLog, numeric: np.ndarray) -> InteractionLog:
    return dataclasses.replace(log, numeric=numeric.astype(np.float32))


def test_the_logged_amount_leads_to_the_logged_features(log: InteractionLog) -> None:
    effects, next_rows = effects_of(log)
    indices = np.flatnonzero(next_rows >= 0)
    logged = (log.incentives[indices].astype(np.float32), log.outcomes[indices])
    numeric, categorical = effects.next_features(torch.from_numpy(indices), *map(torch.from_numpy, logged))
    np.testing.assert_allclose(numeric, log.numeric[next_rows[indices]], atol=1e-6)
    assert np.array_equal(categorical, log.categorical[next_rows[indices]])


@pytest.mark.parametrize("amount", [0.0, 3.0, 10.0])
def test_fatigue_under_another_amount_is_the_simulators(log: InteractionLog, amount: float) -> None:
    effects, next_rows = effects_of(log)
    indices = np.flatnonzero(next_rows >= 0)
    numeric, _ = effects.next_features(
        torch.from_numpy(indices), torch.full((len(indices),), amount), torch.from_numpy(log.outcomes[indices])
    )
    fatigue = log.numeric[indices, 0]
    expected = PARAMETERS.rho * fatigue + PARAMETERS.eta * amount
    largest = log.numeric[:, 0].max()
    np.testing.assert_allclose(numeric[:, 0], np.minimum(expected, largest), atol=1e-3)


def test_a_response_that_bends_among_small_amounts_is_met() -> None:
    """The mean amount is far above where the logarithm bends, so no one scale of amounts fits."""
    parameters = dataclasses.replace(preset("population"), hidden_fatigue=False, rho_spread=0.0)
    log = simulate(parameters, "uniform", users=60, seed=3)
    rows = np.arange(log.events)
    next_rows = Windows(log, rows, length=1).successors().row
    effects = AmountEffects(log, rows, next_rows, parameters.levels)
    indices = np.flatnonzero((next_rows >= 0) & (log.numeric[:, 0] > 0.8) & (log.numeric[:, 0] < 2))
    for amount in parameters.levels[[0, 3, 12, 29]]:
        there = torch.full((len(indices),), float(amount)), torch.from_numpy(log.outcomes[indices])
        moved = effects.next_features(torch.from_numpy(indices), *there)[0][:, 0].numpy()
        logged = log.numeric[next_rows[indices], 0]
        change = parameters.eta * (parameters.g(amount) - parameters.g(log.incentives[indices]))
        np.testing.assert_allclose(moved - logged, change, atol=5e-3)


def test_another_outcome_leads_to_its_features(log: InteractionLog) -> None:
    effects, next_rows = effects_of(log)
    indices = np.flatnonzero(next_rows >= 0)
    other = torch.from_numpy(log.outcomes[indices[::-1].copy()])
    numeric, _ = effects.next_features(torch.from_numpy(indices), torch.from_numpy(log.incentives[indices]), other)
    assert log.schema.numeric[1] == "previous_engagement"
    np.testing.assert_allclose(numeric[:, 1], other[:, 1], atol=1e-3)
    np.testing.assert_allclose(numeric[:, 0], log.numeric[next_rows[indices], 0], atol=1e-3)


def test_a_feature_that_amounts_do_not_touch_stays(log: InteractionLog) -> None:
    numeric = log.numeric.copy()
    numeric[:, 0] = np.random.default_rng(0).normal(size=log.events)
    effects, next_rows = effects_of(with_numeric(log, numeric))
    indices = np.flatnonzero(next_rows >= 0)
    outcomes = torch.from_numpy(log.outcomes[indices])
    moved, _ = effects.next_features(torch.from_numpy(indices), torch.zeros(len(indices)), outcomes)
    assert float((moved[:, 0] - torch.from_numpy(numeric[next_rows[indices], 0]).float()).abs().mean()) < 0.1


def test_missing_features_stay_missing_and_harm_no_other(log: InteractionLog) -> None:
    numeric = log.numeric.copy()
    missing = np.random.default_rng(1).random(log.events) < 0.2
    numeric[missing, 1] = np.nan
    effects, next_rows = effects_of(with_numeric(log, numeric))
    indices = np.flatnonzero(next_rows >= 0)
    outcomes = torch.from_numpy(log.outcomes[indices])
    moved, _ = effects.next_features(torch.from_numpy(indices), torch.full((len(indices),), 5.0), outcomes)
    assert np.array_equal(moved[:, 1].isnan().numpy(), missing[next_rows[indices]])
    expected = PARAMETERS.rho * log.numeric[indices, 0] + PARAMETERS.eta * 5
    np.testing.assert_allclose(moved[:, 0], np.minimum(expected, log.numeric[:, 0].max()), atol=1e-2)
    empty, following = effects_of(with_numeric(log, np.full_like(log.numeric, np.nan)))
    moved, _ = empty.next_features(torch.from_numpy(np.flatnonzero(following >= 0)[:5]), torch.ones(5), outcomes[:5])
    assert moved.isnan().all()


def test_without_decisions_that_follow_one_another_nothing_moves(log: InteractionLog) -> None:
    first = log.offsets[:-1]
    effects = AmountEffects(log, first, np.full(len(first), -1), PARAMETERS.levels)
    assert effects.effect.shape == (10 + 3 + 2 * 2, 3) and not effects.effect.any()
    outcomes = torch.from_numpy(log.outcomes[first[:5]])
    numeric, _ = effects.next_features(torch.arange(5), torch.full((5,), 9.0), outcomes)
    assert torch.equal(numeric, torch.from_numpy(log.numeric[[-1] * 5]))


@pytest.mark.parametrize(("most", "expected"), [(5940, 5940), (4000, 2970), (5939, 2970), (10, 10)])
def test_the_regression_reads_no_more_rows_than_it_says(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch, most: int, expected: int
) -> None:
    read, solve = [], np.linalg.lstsq
    monkeypatch.setattr("goal.training.effects.MOST_ROWS", most)
    monkeypatch.setattr(np.linalg, "lstsq", lambda a, b, rcond: (read.append(len(a)), solve(a, b, rcond=rcond))[1])
    monkeypatch.setattr(AmountEffects, "_standardised", lambda self, present: (read.append(len(present)), present)[1])
    effects_of(log)
    assert set(read) == {expected}


@pytest.mark.parametrize("planned", [True, False])
def test_value_of_amounts_that_the_log_never_shows_in_such_states(
    planned: bool, data: Data, tokenizer: IncentiveTokenizer, log: InteractionLog
) -> None:
    """Greedy pays the most whatever the fatigue, so the log says of high fatigue only what the most does there."""
    rows = np.arange(log.events)

    class Known(PScore):
        """Revenue falls with fatigue alone, so the value of an amount is what its fatigue costs later."""

        def expected(self, states, amounts, name="revenue"):
            fatigue = states[:, -3] * self.state.past.features.std[0] + self.state.past.features.mean[0]
            return (10 - fatigue)[:, None].expand(-1, len(amounts))

    torch.manual_seed(0)
    scaling = FeatureScaling.fit(log, rows)
    config = state_config(tiny_config(data, tokenizer), 16, window=1)
    pscore = Known(config, scaling, objectives=log.schema.objectives, clock=data.clock)
    horizon = PARAMETERS.horizon
    value = LongHorizonValue(pscore.state.size, scaling, multipliers=(0.0,), hidden=32, horizon=horizon)
    ahead = PlannedValue(pscore.state.size, amounts=11, multipliers=1, horizon=horizon) if planned else None
    reward = RewardModel(pscore, [] if planned else [value], planned=ahead, grid=torch.arange(11.0),
                         multipliers=torch.tensor([0.0]), discount=0.5, cost_rate=1.0, clock=data.clock)  # fmt: skip
    if planned:
        plan(reward, log, rows, generator=torch.Generator().manual_seed(0))
    else:
        config = RewardConfig(discount=0.5, travel=40, value=LoopConfig(steps=800, batch_size=256, learning_rate=5e-3))
        stage = ValueStage(reward, log, rows, config, horizon=horizon)
        Loop(config.value).run(stage)
        stage.finish()
    high = np.flatnonzero(log.numeric[:, 0] > 4.5)[:50]
    assert (log.incentives[high] == PARAMETERS.max_level).all()
    with torch.no_grad():
        states = pscore.state.pending(Windows(log, high, length=1).batch(np.arange(len(high))))
        utility, _ = reward.to_go(states, torch.full((len(high),), 0.5))
    # Paying a unit more now adds eta to the next fatigue, rho * eta to the one after, ...: discounted, 0.5 a step.
    expected = -PARAMETERS.eta * 10 / (1 - 0.5 * PARAMETERS.rho)
    assert float((utility[:, 10, 0] - utility[:, 0, 0]).mean()) == pytest.approx(expected, rel=0.1)
