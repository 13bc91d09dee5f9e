"""Small policies and random histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from goal import History, Policy, PolicyConfig


def small_config(**changes: object) -> PolicyConfig:
    values: dict = {
        "vocabulary": (100.0, 30.0, 7.0, 1.0),
        "numeric_features": 2,
        "categories": (("a", "b", "c"),),
        "outcomes": 2,
        "window": 8,
        "dimension": 16,
        "heads": 2,
        "dilations": (1, 2),
        "feedforward": 16,
        "expert_hidden": 8,
        "max_length": 9,
    }
    return PolicyConfig(**{**values, **changes})


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    def make(**changes: object) -> Policy:
        torch.manual_seed(0)
        return Policy(small_config(**changes)).eval()

    return make


@pytest.fixture
def make_history() -> Callable[..., History]:
    def make(count: int = 6, window: int = 8, seed: int = 0, full: bool = False) -> History:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, window + 1, (count,), generator=generator)
        if full:
            lengths = torch.full((count,), window)
        place = torch.arange(window)
        valid, past = place < lengths[:, None], place < lengths[:, None] - 1
        return History(
            numeric=torch.randn(count, window, 2, generator=generator) * valid[..., None],
            categorical=torch.randint(0, 4, (count, window, 1), generator=generator) * valid[..., None],
            incentives=torch.randint(0, 50, (count, window), generator=generator).float() * past,
            outcomes=torch.rand(count, window, 2, generator=generator) * past[..., None],
            lengths=lengths,
        )

    return make
