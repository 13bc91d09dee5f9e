"""Whether the past of a decision is used: the evidence of kept-back users."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from goal.config import LoopConfig, PolicyConfig, RewardConfig
from goal.data import Data
from goal.log import Splits, Windows
from goal.reward import PScore
from goal.reward.state import state_config
from goal.simulator import preset, simulate
from goal.training import Loop, PScoreStage

from .conftest import make_pscore


def fitted(log, *, clock: str | None) -> tuple[PScore, float]:
    """A P-Score fitted to all rows, and the evidence that it found for the past."""
    rows = np.arange(log.events)
    splits = Splits(rows, np.zeros(0, np.int64), np.zeros(0, np.int64))
    larger = Data(log, splits, None, 0)
    torch.manual_seed(0)
    config = PolicyConfig(
        vocabulary=(1.0,), numeric_features=log.numeric.shape[1], outcomes=2, heads=1, dilations=(1, 2)
    )
    pscore = PScore(state_config(config, 24, window=32), larger.scaling, objectives=log.schema.objectives,
                    clock=None if clock is None else log.schema.numeric.index(clock))  # fmt: skip
    settings = RewardConfig(pscore=LoopConfig(steps=250, batch_size=1024, learning_rate=5e-3))
    stage = PScoreStage(pscore, log, rows, settings)
    Loop(settings.pscore).run(stage)
    return pscore, stage.finish()


def test_the_past_is_left_out_where_the_features_say_all_and_used_where_they_do_not() -> None:
    seen = simulate(preset("calibrated"), "uniform", users=400, seed=5)  # fatigue is a feature
    pscore, evidence = fitted(seen, clock="progress")
    assert evidence < 3 and not pscore.state.uses_history
    windows = Windows(seen, np.arange(50, 90), length=8)
    history = windows.batch(np.arange(40))
    with torch.no_grad():
        paid = dataclasses.replace(history, incentives=torch.where(history.incentives > 0, 10.0, history.incentives))
        assert torch.equal(pscore.state.pending(history), pscore.state.pending(paid))

    hidden = dataclasses.replace(preset("calibrated"), hidden_fatigue=True)
    pscore, evidence = fitted(simulate(hidden, "uniform", users=1000, seed=5), clock="progress")
    assert evidence > 3 and pscore.state.uses_history


@pytest.mark.parametrize(("users", "kept"), [(9, 0), (10, 5), (30, 5), (230, 11)])
def test_whole_users_are_kept_back_and_never_more_than_half(users: int, kept: int, tokenizer) -> None:
    log = simulate(dataclasses.replace(preset("calibrated"), horizon=70), "uniform", users=users, seed=1)
    rows = np.arange(log.events)
    nothing = np.zeros(0, dtype=np.int64)
    pscore = make_pscore(data := Data(log, Splits(rows, nothing, nothing), None, 0), tokenizer)
    stage = PScoreStage(pscore, data.log, rows, RewardConfig())
    learned, held_out = (
        set(log.user_index[stage.segments.windows.rows[part]]) for part in (stage.learned, stage.held_out)
    )
    assert len(held_out) == kept and not learned & held_out and len(learned | held_out) == users
    evidence = stage.finish()
    assert np.isnan(evidence) == (kept == 0) and (kept > 0 or not pscore.state.uses_history)


def test_users_without_a_past_tell_nothing_of_it(tokenizer) -> None:
    log = simulate(dataclasses.replace(preset("calibrated"), horizon=1), "uniform", users=300, seed=1)
    rows, nothing = np.arange(log.events), np.zeros(0, dtype=np.int64)
    pscore = make_pscore(data := Data(log, Splits(rows, nothing, nothing), None, 0), tokenizer)
    stage = PScoreStage(pscore, data.log, rows, RewardConfig())
    assert len(stage.held_out) == 0 and len(stage.learned) == 285
    assert np.isnan(stage.finish()) and not pscore.state.uses_history


def test_evidence_counts_users_and_not_what_was_cut_of_their_log(data: Data, tokenizer) -> None:
    """The gain of a group is the mean over its users' decisions, however many stretches hold them."""
    rows = data.splits.training
    pscore = make_pscore(data, tokenizer).eval()
    with torch.no_grad():
        pscore.state.unknown += 1.0
    stage = PScoreStage(pscore, data.log, rows, RewardConfig())
    users = data.log.user_index[stage.segments.windows.rows[stage.held_out]]
    gains = []
    for user in np.unique(users):
        segments = stage.held_out[torch.from_numpy(users == user)]
        losses, decisions = [], []
        for segment in segments.split(1):
            with torch.no_grad():
                without, with_past = (
                    pscore.weigh(stage._losses(segment, torch.tensor([forget]), learning=False))
                    for forget in (True, False)
                )
            losses.append(float(without - with_past))
            decisions.append(int(stage.segments.counts[segment]))
        gains.append(np.average(losses, weights=decisions))
    expected = np.mean(gains) / (np.std(gains, ddof=1) / len(gains) ** 0.5)
    assert len(gains) < 50 and stage.finish() == pytest.approx(expected, rel=1e-3)
