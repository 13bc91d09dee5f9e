"""Settings that cannot work are refused where they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from goal.config import (
    ConstraintConfig,
    LoopConfig,
    NetworkConfig,
    PolicyConfig,
    RewardConfig,
    RunConfig,
    ScpoConfig,
)
from goal.effort import effort
from goal.errors import ConfigurationError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ScpoConfig(rollout="exakt"),
            "rollout='exakt': expected 'auto', 'exact', 'shared' or 'per_multiplier'",
        ),
        (lambda: ScpoConfig(kl="k2"), "kl='k2': expected 'exact' or 'k3'"),
        (lambda: ScpoConfig(ratio="word"), "ratio='word': expected 'sequence' or 'token'"),
        (
            lambda: NetworkConfig(convolution_activation="relu"),
            "convolution_activation='relu': expected 'linear' or 'gelu'",
        ),
        (lambda: RunConfig(effort="much"), "effort='much': expected 'default' or 'thorough'"),
        (lambda: effort("much"), "effort='much': expected 'default' or 'thorough'"),
        (lambda: effort("much", simulated=False), "effort='much': expected 'default' or 'thorough'"),
    ],
)
def test_words_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (ScpoConfig, "exploration", (-0.1, 1.1)),
        (ScpoConfig, "importance_cap", (0.0, -1.0)),
        (ScpoConfig, "std_floor", (-1.0, math.inf)),
        (ScpoConfig, "advantage_epsilon", (0.0, math.inf)),
        (ScpoConfig, "kl_weight_start", (-0.1, math.inf)),
        (ScpoConfig, "kl_weight", (math.inf,)),
        (RewardConfig, "fusion_weight", (math.inf,)),
        (RewardConfig, "travel", (0.0, math.inf)),
        (ConstraintConfig, "step", (0.0, math.inf)),
        (ConstraintConfig, "fine_step", (0.0, math.inf)),
        (NetworkConfig, "weight_smoothing", (0.0, math.inf)),
        (RewardConfig, "dimension", (0,)),
        (RewardConfig, "value_dimension", (0,)),
        (LoopConfig, "weight_decay", (-0.1, math.inf)),
        (LoopConfig, "warmup_steps", (-1,)),
        (LoopConfig, "learning_rate", (0.0, math.inf)),
        (LoopConfig, "final_learning_rate", (-1e-3, math.inf)),
        (LoopConfig, "checkpoint_seconds", (-1.0,)),
    ],
)
def test_numbers_are_checked(kind: type, name: str, values: tuple[float, ...]) -> None:
    needed = {"steps": 1, "batch_size": 1} if kind is LoopConfig else {}
    for value in (*values, math.nan):
        with pytest.raises(ConfigurationError, match=rf"{name}={value!r}: expected "):
            kind(**needed, **{name: value})


def test_no_amount_is_offered_beyond_the_maximum() -> None:
    with pytest.raises(ConfigurationError, match=r"allowed_amounts=.* none above maximum_amount=4\.0"):
        PolicyConfig(vocabulary=(3.0, 1.0), maximum_amount=4.0, allowed_amounts=(0.0, 3.0, 6.0))
    with pytest.raises(ConfigurationError, match="finite amounts"):
        PolicyConfig(vocabulary=(3.0, 1.0), allowed_amounts=(0.0, math.inf))
    with pytest.raises(ConfigurationError, match="strictly descending and finite"):
        PolicyConfig(vocabulary=(math.inf, 1.0))
    # Sums of the vocabulary round.
    PolicyConfig(vocabulary=(0.2, 0.1), maximum_amount=0.3, allowed_amounts=(0.0, 0.1 + 0.2))
