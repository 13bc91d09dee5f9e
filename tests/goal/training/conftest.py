"""A small simulated log and a policy that fits it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from goal import IncentiveTokenizer, Policy, PolicyConfig
from goal.data import Data
from goal.log import Splits
from goal.reward import PScore
from goal.reward.state import state_config
from goal.simulator import preset, simulate


@pytest.fixture(scope="session")
def data() -> Data:
    log = simulate(preset("calibrated"), "uniform", users=40, seed=1)
    nothing = np.zeros(0, dtype=np.int64)
    return Data(log, Splits(np.arange(log.events), nothing, nothing), preset("calibrated"), 0)


@pytest.fixture(scope="session")
def tokenizer(data: Data) -> IncentiveTokenizer:
    return IncentiveTokenizer.fit(data.log.incentives)


def tiny_config(data: Data, tokenizer: IncentiveTokenizer, **changes: object) -> PolicyConfig:
    values: dict = {
        "vocabulary": tuple(tokenizer.values.tolist()),
        "numeric_features": 3,
        "outcomes": 2,
        "window": 4,
        "dimension": 16,
        "heads": 2,
        "dilations": (1, 2),
        "feedforward": 16,
        "expert_hidden": 8,
        "max_length": tokenizer.max_length + 1,
        "allowed_amounts": data.allowed_amounts,
    }
    return PolicyConfig(**{**values, **changes})


@pytest.fixture
def policy(data: Data, tokenizer: IncentiveTokenizer) -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_config(data, tokenizer), data.scaling)


def make_pscore(data: Data, tokenizer) -> PScore:
    torch.manual_seed(0)
    config = state_config(tiny_config(data, tokenizer), 16, window=32)
    return PScore(config, data.scaling, objectives=data.schema.objectives, clock=data.clock)
