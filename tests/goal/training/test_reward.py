"""Training of the reward model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from goal.config import LoopConfig, PolicyConfig, RewardConfig
from goal.data import Data
from goal.log import FeatureScaling
from goal.model.embedding import AmountFeatures, neutral_scaling
from goal.reward import LongHorizonValue, PScore, RewardModel
from goal.reward.bins import MOST_BINS, Bins
from goal.reward.pscore import ResponseTower
from goal.reward.state import DecisionState, state_config
from goal.simulator import preset, simulate
from goal.training import Loop, PScoreStage, ValueStage
from goal.training.pscore import CONTEXT, SEGMENT, Segments, carried_by
from goal.training.transitions import Transitions, balance

from .conftest import make_pscore, tiny_config


def test_segments_hold_every_row_once(data: Data) -> None:
    rows = data.splits.training[data.splits.training % 7 != 3]
    segments = Segments(data.log, rows, context=6)
    found = torch.cat([segments.batch(indices)[1] for indices in torch.arange(len(segments)).split(5)])
    assert torch.equal(found.sort().values, torch.from_numpy(rows))


def test_what_a_stretch_carries_is_what_windows_do(data: Data, tokenizer) -> None:
    """The last decision of a stretch has all of it before it; its window is as long."""
    pscore = make_pscore(data, tokenizer).eval()
    carried = carried_by(pscore, data.log, data.splits.training)
    windows = Segments(data.log, data.splits.training, context=CONTEXT).windows
    assert windows.length == CONTEXT + SEGMENT
    history = windows.batch(np.arange(len(windows)))
    with torch.no_grad():
        by_window = pscore.state.carry(history)[torch.arange(len(history)), history.lengths - 1]
    torch.testing.assert_close(carried[torch.from_numpy(windows.rows)].float(), by_window, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [1, 32])
def test_one_event_on_is_what_the_next_event_finds(window: int, data: Data, tokenizer) -> None:
    torch.manual_seed(0)
    state = DecisionState(state_config(tiny_config(data, tokenizer), 16, window=window), data.scaling, clock=data.clock)
    history = data.windows(np.array([7, 160]), 8).batch(np.arange(2))
    with torch.no_grad():
        carried = state.carry(history)
        event = (
            column[:, 6] for column in (history.numeric, history.categorical, history.incentives, history.outcomes)
        )
        after = state.after(carried[:, 6], *event)
        torch.testing.assert_close(after, carried[:, 7])
        pending = state.of(after, history.numeric[:, 7], history.categorical[:, 7])
        torch.testing.assert_close(pending, state.pending(history))
    assert (carried.shape[-1] == 0) is (window == 1)


def test_a_new_user_is_not_one_whose_past_is_left_out(data: Data, tokenizer) -> None:
    state = make_pscore(data, tokenizer).state.eval()
    torch.nn.init.ones_(state.unknown)
    history = data.windows(np.array([0, 50]), 1).batch(np.arange(2))
    with torch.no_grad():
        left_out, as_it_is = (state(history, forget=torch.full((2,), forget))[0] for forget in (True, False))
    assert (left_out != as_it_is).any(dim=-1).all()


def test_a_state_knows_its_whole_past_and_nothing_else(data: Data, tokenizer) -> None:
    state = make_pscore(data, tokenizer).state.eval()
    history = data.windows(np.array([60, 250]), 12).batch(np.arange(2))
    with torch.no_grad():
        states, _ = state(history)
        for place in range(11):
            changed = dataclasses.replace(history, incentives=history.incentives.clone())
            changed.incentives[:, place] += 1
            moved = (state(changed)[0] - states).abs().amax(dim=-1)
            assert (moved[:, : place + 1] == 0).all() and (moved[:, place + 1 :] > 0).all()


def test_payments_add_up_and_nothing_paid_is_nothing(data: Data, tokenizer) -> None:
    past = make_pscore(data, tokenizer).state.past.eval()
    history = data.windows(np.array([60, 250]), 12).batch(np.arange(2))
    averages = past.sizes[0]

    def carried(incentives: torch.Tensor) -> torch.Tensor:
        return past.carry(history.numeric, dataclasses.replace(history, incentives=incentives))[0]

    paid = torch.where(torch.arange(12) % 3 == 0, history.incentives + 1, 0)
    others = torch.where(torch.arange(12) % 3 == 0, 0, history.incentives + 2)
    with torch.no_grad():
        nothing = carried(torch.zeros_like(paid))
        nothing = torch.cat([nothing[..., :averages], nothing[..., -past.sizes[2] :]], dim=-1)
        torch.testing.assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=1e-6)
        together = carried(paid)[..., :averages] + carried(others)[..., :averages]
        torch.testing.assert_close(together, carried(paid + others)[..., :averages])


def test_whatever_the_score_says_it_says_from_the_past_too(data: Data, tokenizer) -> None:
    pscore = make_pscore(data, tokenizer).eval()
    history = data.windows(np.array([60, 250]), 12).batch(np.arange(2))
    paid = dataclasses.replace(history, incentives=history.incentives + (torch.arange(12) < 11))
    amounts = torch.tensor([0.0, 4.0])
    with torch.no_grad():
        states = [pscore.state.pending(each) for each in (history, paid)]
        for say in (pscore.expected, pscore.fused, pscore.chances):
            before, after = (say(each, amounts) for each in states)
            assert (before != after).all()


def test_what_stands_where_the_outcome_will_be_is_never_read(data: Data, tokenizer) -> None:
    state = make_pscore(data, tokenizer).state.eval()
    history = data.windows(np.array([60, 250]), 12).batch(np.arange(2))
    changed = dataclasses.replace(history, outcomes=history.outcomes.clone(), incentives=history.incentives.clone())
    changed.outcomes[:, -1], changed.incentives[:, -1] = torch.nan, torch.nan
    with torch.no_grad():
        assert torch.equal(state.pending(history), state.pending(changed))


def test_an_outcome_as_expected_leaves_no_trace(data: Data, tokenizer) -> None:
    past = make_pscore(data, tokenizer).state.past.eval()
    events = torch.randn(7, past.surprise.context.in_features)
    with torch.no_grad():
        expected = past.surprise.expect(silu(past.surprise.context(events)))
        features, error = past.surprise(events, expected)
        assert (features == 0).all() and (error == 0).all()
        features, error = past.surprise(events, expected + 0.5)
    assert (features != 0).any(dim=-1).all()
    torch.testing.assert_close(error, torch.full((7,), 0.25))


def test_what_is_expected_is_learned_from_real_events_alone(data: Data, tokenizer) -> None:
    past = make_pscore(data, tokenizer).state.past.eval()
    history = data.windows(np.array([3, 250]), 12).batch(np.arange(2))
    changed = dataclasses.replace(history, outcomes=history.outcomes.clone())
    pending = torch.arange(12) >= history.lengths[:, None] - 1
    changed.outcomes[pending] = 9.0  # of the pending event, and of the padding after it
    with torch.no_grad():
        (_, error), (_, as_well) = (past.carry(each.numeric, each) for each in (history, changed))
    assert error > 0 and torch.equal(error, as_well)


def test_the_past_is_added_to_what_an_amount_brings_and_multiplied_with_it() -> None:
    torch.manual_seed(0)
    scaling = neutral_scaling(PolicyConfig(vocabulary=(5.0, 1.0)))
    tower = ResponseTower(3, 8, AmountFeatures(scaling), 16, 2)
    states, amounts = torch.randn(4, 8), torch.tensor([0.0, 1.0, 5.0])
    with torch.no_grad():
        logits, representation = tower(states, amounts)
        assert logits.shape == (4, 3, 2) and representation.shape == (4, 3, 16)
        moved, unmoved = tower(torch.cat([states[:, :3] + 1, states[:, 3:]], dim=-1), amounts)
        twice = tower(torch.cat([states[:, :3] + 2, states[:, 3:]], dim=-1), amounts)[0]
        assert torch.equal(unmoved, representation)
        torch.testing.assert_close(twice - logits, 2 * (moved - logits))  # at every amount a line in the past
        assert ((moved - logits).std(dim=1) > 0).all()  # of another slope at each


def test_outcomes_are_drawn_as_the_pscore_expects_them(data: Data, tokenizer) -> None:
    pscore = make_pscore(data, tokenizer).eval()
    reward = RewardModel(pscore, [], grid=torch.arange(11.0), multipliers=torch.tensor([1.0]), discount=0.9,
                         cost_rate=1.0, clock=data.clock)  # fmt: skip
    transitions = Transitions(reward, data.log, data.splits.training)
    generator = torch.Generator().manual_seed(0)
    states = transitions.states(torch.arange(40))
    amounts = torch.full((40,), 5.0)
    with torch.no_grad():
        drawn = torch.stack([
            transitions.outcomes(pscore.draw(states, amounts, generator), torch.rand(40, generator=generator))
            for _ in range(2000)
        ])  # fmt: skip
        logits, _ = pscore.towers[0](states[:, : pscore.state.visible], amounts[:, None])
        chance = torch.sigmoid(logits)
    occurred = drawn[..., 0] > 0
    assert torch.equal(occurred, drawn[..., 1] > 0), "outcomes of one decision belong together"
    assert set(drawn[..., 0].unique().tolist()) <= set(data.log.outcomes[:, 0].tolist())
    torch.testing.assert_close(occurred.float().mean(dim=0), chance[:, 0, 0], rtol=0, atol=0.05)


def test_pscore_learns_the_response(data: Data, tokenizer) -> None:
    log = simulate(preset("calibrated"), "uniform", users=400, seed=5)
    rows = np.arange(log.events)
    larger = Data(log, data.splits, data.parameters, 0)
    torch.manual_seed(0)
    config = state_config(tiny_config(data, tokenizer), 32, window=32)
    pscore = PScore(config, FeatureScaling.fit(log, rows), objectives=log.schema.objectives, clock=larger.clock)
    settings = RewardConfig(pscore=LoopConfig(steps=250, batch_size=1024, learning_rate=5e-3))
    Loop(settings.pscore).run(PScoreStage(pscore, log, rows, settings))
    windows = larger.windows(rows[::37], 8)
    grid = torch.arange(11.0)
    with torch.no_grad():
        predicted = pscore.eval().predict(windows.batch(np.arange(len(windows))), grid).numpy()
    fatigue = log.numeric[rows[::37], 0]
    truth = 30 / (1 + np.exp(3 - 0.8 * np.arange(11) + 1.2 * fatigue[:, None]))
    assert np.abs(predicted - truth).mean() < 1.0


def test_rare_decisions_weigh_more(data: Data) -> None:
    rows = data.splits.training
    weights = balance(data.log, rows, leave_out=data.clock)
    assert weights.shape == rows.shape and (weights > 0).all() and (weights <= 1).all()
    fatigue = data.log.numeric[rows, 0]
    rare = fatigue < 0.3
    assert weights[rare].mean() > 1.5 * weights[~rare].mean()
    # The clock plays no part: shuffling it changes nothing.
    numeric = data.log.numeric.copy()
    numeric[:, data.clock] = np.random.default_rng(0).permutation(numeric[:, data.clock])
    numeric[3, 0] = np.nan  # a missing number is a cell of its own
    moved = balance(dataclasses.replace(data.log, numeric=numeric), rows, leave_out=data.clock)
    assert moved[3] == 1.0 and np.abs(np.delete(moved - weights, 3)).max() < 0.5


def test_without_a_window_there_is_no_past(data: Data, tokenizer) -> None:
    state = DecisionState(state_config(tiny_config(data, tokenizer), 16, window=1), data.scaling, clock=None)
    assert state.window == 1 and state.recall is None and not state.uses_history
    windows = [data.windows(np.array([60, 250]), length).batch(np.arange(2)) for length in (1, 40)]
    with torch.no_grad():
        torch.testing.assert_close(*(state.pending(history) for history in windows))


def test_without_a_clock_an_episode_ends_where_the_log_says(data: Data, tokenizer) -> None:
    pscore = make_pscore(data, tokenizer)
    rows = data.splits.training
    for clock, expected in ((None, len(rows)), (data.clock, len(rows) - 40)):
        reward = RewardModel(pscore, [], grid=torch.arange(11.0), multipliers=torch.tensor([1.0]), discount=0.9,
                             cost_rate=1.0, clock=clock)  # fmt: skip
        transitions = Transitions(reward, data.log, rows)
        assert len(transitions) == expected  # with a clock the 40 last events have no successor and teach nothing
        assert int((transitions.going_on == 0).sum()) == (40 if clock is None else 0)


def test_the_clock_does_not_reach_the_pscore(data: Data, tokenizer) -> None:
    pscore = make_pscore(data, tokenizer).eval()
    history = data.windows(data.splits.training, 8).batch(np.arange(50))
    moved = history.numeric.clone()
    moved[..., 2] += 0.3
    changed = type(history)(moved, history.categorical, history.incentives, history.outcomes, history.lengths)
    with torch.no_grad():
        assert torch.equal(pscore.state.pending(history), pscore.state.pending(changed))


def test_value_of_a_world_without_fatigue_is_the_myopic_optimum_times_what_is_left(data: Data, tokenizer) -> None:
    """Nothing carries over, so utility-to-go is the best immediate utility, discounted over the steps left."""

    class Known(PScore):
        def expected(self, states, amounts, name="revenue"):
            return (4 * torch.sqrt(amounts)).expand(len(states), -1)

    torch.manual_seed(0)
    config = state_config(tiny_config(data, tokenizer), 16, window=32)
    pscore = Known(config, data.scaling, objectives=data.schema.objectives, clock=data.clock)
    multipliers = torch.tensor([0.5, 1.0, 2.0])
    values = [
        LongHorizonValue(
            pscore.state.size,
            data.scaling,
            multipliers=tuple(multipliers.tolist()),
            hidden=32,
            horizon=100,
        )
        for _ in range(2)
    ]
    reward = RewardModel(pscore, values, grid=torch.arange(11.0), multipliers=multipliers, discount=0.9, cost_rate=1.0,
                         clock=data.clock)  # fmt: skip
    config = RewardConfig(discount=0.9, travel=75.0, value=LoopConfig(steps=1500, batch_size=512, learning_rate=5e-3))
    stage = ValueStage(reward, data.log, data.splits.training, config, horizon=100)
    Loop(config.value).run(stage)
    stage.finish()
    best = (4 * reward.grid.sqrt()[:, None] - multipliers * reward.grid[:, None]).max(dim=0).values
    windows = data.windows(data.splits.training[40:60], 64)
    with torch.no_grad():
        states = pscore.state.pending(windows.batch(np.arange(20)))
        for step in (10, 90, 95):
            left = 99 - step
            expected = best * (1 - 0.9**left) / (1 - 0.9)
            utility, _ = reward.to_go(states, torch.full((20,), step / 100))
            torch.testing.assert_close(utility.mean(dim=(0, 1)), expected, rtol=0.05, atol=0.3)
    table = reward.table(states, torch.full((20,), 0.5))
    utility = table.reward - multipliers * table.cost
    assert torch.equal(utility.argmax(dim=1)[0], torch.tensor([10, 4, 1]))


def test_reading_between_the_grid(data: Data, tokenizer) -> None:
    pscore = make_pscore(data, tokenizer)
    reward = RewardModel(pscore, [], grid=torch.tensor([0.0, 1.0, 4.0]), multipliers=torch.tensor([0.0, 1.0]),
                         discount=0.9, cost_rate=2.0)  # fmt: skip
    windows = data.windows(data.splits.training, 8)
    table = reward.tabulate(windows.batch(np.arange(3)))
    assert table.reward.shape == (3, 3, 2)
    amounts = torch.tensor([0.0, 0.25, 1.0, 2.5, 4.0, 9.0]).expand(3, 2, 6)
    read = reward.at(table, amounts)
    torch.testing.assert_close(read.cost[0, 0], torch.tensor([0.0, 0.5, 2.0, 5.0, 8.0, 18.0]))
    torch.testing.assert_close(read.reward[:, :, 3], 0.5 * (table.reward[:, 1] + table.reward[:, 2]))
    torch.testing.assert_close(read.reward[:, :, 5], table.reward[:, 2])


def test_beyond_the_grid_a_learned_cost_goes_on_at_its_present_rate(data: Data, tokenizer) -> None:
    """What is paid later is in C as well, and is not paid once more for each unit that the grid lacks."""
    torch.manual_seed(0)
    config = state_config(tiny_config(data, tokenizer), 16, window=8)
    pscore = PScore(config, data.scaling, objectives=data.schema.objectives, cost_tower=True, clock=data.clock)
    value = LongHorizonValue(
        pscore.state.size, data.scaling, multipliers=(0.0, 1.0), hidden=8, horizon=data.schema.horizon
    )
    reward = RewardModel(pscore, [value], grid=torch.tensor([0.0, 2.0]), multipliers=torch.tensor([0.0, 1.0]),
                         discount=0.9, cost_rate=None, clock=data.clock)  # fmt: skip
    history = data.windows(data.splits.training, 8).batch(np.arange(3))
    with torch.no_grad():
        present = reward.immediate(pscore.state.pending(history))[1][:, 1]
        read = reward.at(reward.tabulate(history), torch.tensor([2.0, 5.0]).expand(3, 2, 2))
    torch.testing.assert_close(read.cost[..., 1] - read.cost[..., 0], (1.5 * present)[:, None].expand(3, 2))


@pytest.mark.parametrize("discount", [1.0, -0.1])
def test_bad_discount(discount: float) -> None:
    with pytest.raises(ValueError, match="discount"):
        RewardConfig(discount=discount)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6, width=32), max_size=200))
def test_bins_hold_every_positive_outcome_and_keep_the_mean(values: list[float]) -> None:
    outcomes = np.array(values, dtype=np.float64)
    bins = Bins.fit(outcomes)
    positive = outcomes[outcomes > 0]
    means = np.array(bins.means)
    assert 1 <= len(means) <= MOST_BINS and len(bins.edges) == len(means) - 1
    assert (np.diff(means) > 0).all() and (np.diff(bins.edges) > 0).all() and (means > 0).all()
    place = torch.bucketize(torch.tensor(positive, dtype=torch.float32), torch.tensor(bins.edges)).numpy()
    if len(positive):
        assert means[place].mean() == pytest.approx(positive.mean())
        assert set(place) == set(range(len(means)))
        distinct = np.unique(positive)
        assert len(distinct) > MOST_BINS or np.allclose(means[place], positive)
