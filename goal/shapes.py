"""Policy and reward model of a run's shape, before any training: the settings say what they can, the log the rest."""

from __future__ import annotations

import numpy as np
import torch

from goal.config import PolicyConfig, RunConfig
from goal.data import Data
from goal.errors import ConfigurationError
from goal.reward import LongHorizonValue, PlannedValue, PScore, RewardModel
from goal.reward.state import state_config
from goal.serialization import to_dict
from goal.tokenizer import IncentiveTokenizer


def policy_config(config: RunConfig, data: Data, tokenizer: IncentiveTokenizer) -> PolicyConfig:
    """Return the shape of the policy.

    Where amounts are listed, it offers those that the vocabulary writes and leaves the others out.

    Raises:
        ConfigurationError: the vocabulary writes none of the amounts that were paid.
    """
    allowed, maximum = data.allowed_amounts, float(data.distinct_amounts[-1])
    if allowed is not None:
        written = np.array(allowed)[tokenizer.writes(allowed)]
        if not written.any():
            raise ConfigurationError(
                f"vocabulary: writes none of the amounts that were paid ({', '.join(f'{a:g}' for a in allowed if a)}); "
                f"take a --vocabulary.min-unit below {tokenizer.min_unit:g}, or more --vocabulary.max-tokens"
            )
        # As it decodes, free of rounding.
        allowed = tuple(np.unique(tokenizer.decode(tokenizer.encode(written)).numpy()).tolist())
        maximum = max(maximum, allowed[-1])
    return PolicyConfig(
        **to_dict(config.network),
        vocabulary=tuple(float(value) for value in tokenizer.values),
        numeric_features=data.log.numeric.shape[1],
        categories=data.log.categories,
        outcomes=data.log.outcomes.shape[1],
        multiplier_max=config.roi_target,
        max_length=tokenizer.max_length + 1,
        allowed_amounts=allowed,
        maximum_amount=maximum,
    )


def build_reward(
    config: RunConfig,
    data: Data,
    shape: PolicyConfig,
    multipliers: tuple[float, ...],
    device: torch.device,
    *,
    planned: bool,
) -> RewardModel:
    """Return an untrained reward model; its weights depend on the seed alone.

    Args:
        config: of the run.
        data: likewise.
        shape: of the policy.
        multipliers: the candidate set.
        device: where it lies.
        planned: whether values are planned, where they are asked for at all; else networks learn them.
    """
    torch.manual_seed(config.seed)
    settings = config.reward
    pscore = PScore(
        state_config(shape, settings.dimension, window=settings.window),
        data.scaling,
        objectives=data.schema.objectives,
        bins=data.outcome_bins,
        cost_tower=data.cost_rate is None,
        clock=data.clock,
    )
    grid = torch.from_numpy(data.grid(settings.grid_size))
    long = settings.horizon == "long" and data.schema.horizon != 1  # after an only step nothing follows
    clocked = data.clock is not None and data.schema.horizon is not None
    horizon = data.schema.horizon if clocked else None
    values = [
        LongHorizonValue(
            pscore.state.size, data.scaling, multipliers=multipliers, hidden=settings.value_dimension, horizon=horizon
        )
        for _ in range(settings.ensemble if long and not planned else 0)
    ]
    size, count = pscore.state.size, len(multipliers)
    return RewardModel(
        pscore,
        values,
        planned=PlannedValue(size, amounts=len(grid), multipliers=count, horizon=horizon) if long and planned else None,
        grid=grid,
        multipliers=torch.tensor(multipliers),
        discount=settings.episode_discount if planned and clocked else settings.discount,
        cost_rate=data.cost_rate,
        fusion_weight=settings.fusion_weight,
        clock=data.clock if clocked else None,
    ).to(device)
