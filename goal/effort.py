"""How much a run does: the settings of its levels of effort."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from goal.config import LoopConfig, PretrainingConfig, RewardConfig, RunConfig, ScpoConfig


def effort(level: Literal["default", "thorough"], *, simulated: bool = True) -> RunConfig:
    """Return the settings of a level of effort: `default` is minutes on two cores, `thorough` tens of minutes.

    Args:
        level: of effort.
        simulated: whether the log comes from the simulator. A real one takes longer to imitate, has amounts of many
            tokens, whose groups are smaller, and an immediate horizon: what an amount does to later visits is not to be
            learned from a log whose amounts nobody randomised.

    Raises:
        ConfigurationError: there is no such level.
    """
    config = RunConfig(effort=level)
    if not simulated:
        config = RunConfig(
            effort=level,
            pretraining=PretrainingConfig(loop=LoopConfig(steps=1200, batch_size=128, learning_rate=3e-3)),
            reward=RewardConfig(
                horizon="immediate",
                pscore=LoopConfig(steps=800, batch_size=1024, learning_rate=3e-3),
                value=LoopConfig(steps=1200, batch_size=1024, learning_rate=2e-3, warmup_steps=100),
            ),
            scpo=ScpoConfig(loop=LoopConfig(steps=120, batch_size=96, learning_rate=1e-3, log_every=10), group_size=8),
        )
    if level == "default":
        return config

    def longer(loop: LoopConfig, factor: int) -> LoopConfig:
        return replace(loop, steps=factor * loop.steps)

    if simulated:  # what a longer window brings was measured there alone
        config = replace(
            config,
            network=replace(config.network, window=2 * config.network.window),
            # Six times the steps where the past is left out found no more than three times did.
            scpo=replace(config.scpo, most_tokens=3 * config.scpo.most_tokens // 2, repeat=1),
        )
    reward, scpo = config.reward, config.scpo
    return replace(
        config,
        pretraining=PretrainingConfig(loop=longer(config.pretraining.loop, 2)),
        # More passes over the log than these would fit its noise.
        reward=replace(
            reward,
            pscore=replace(reward.pscore, batch_size=2 * reward.pscore.batch_size),
            value=longer(reward.value, 5),
        ),
        scpo=replace(scpo, loop=longer(scpo.loop, 3)),
    )
