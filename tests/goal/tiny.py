"""Settings of a whole run that takes seconds."""

from __future__ import annotations

import dataclasses

from goal.config import (
    ConstraintConfig,
    EvaluationConfig,
    LoopConfig,
    NetworkConfig,
    PretrainingConfig,
    RewardConfig,
    RunConfig,
    ScpoConfig,
)


def loop(steps: int, batch: int) -> LoopConfig:
    return LoopConfig(steps=steps, batch_size=batch, warmup_steps=1, log_every=1, checkpoint_seconds=0.0)


TINY = RunConfig(
    simulated_users=30,
    threads=1,
    device="cpu",
    network=NetworkConfig(window=4, dimension=16, feedforward=16, expert_hidden=8, dilations=(1, 2)),
    pretraining=PretrainingConfig(loop=loop(4, 32)),
    reward=RewardConfig(dimension=16, value_dimension=16, grid_size=8, pscore=loop(4, 64), value=loop(4, 64)),
    scpo=ScpoConfig(loop=loop(3, 32), repeat=1),
    constraint=ConstraintConfig(users=10, fine_step=0.2),
    evaluation=EvaluationConfig(users=12, rvr_window=100, rvr_stride=25),
)
REMEMBERING = dataclasses.replace(
    TINY,
    reward=dataclasses.replace(TINY.reward, history="always", window=4),
    scpo=dataclasses.replace(TINY.scpo, repeat=2),
)
"""Its value is learned by networks instead of planned."""
