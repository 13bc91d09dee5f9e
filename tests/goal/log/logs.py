"""Logs for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from goal.log import InteractionLog, Objective, Schema

SCHEMA = Schema(
    user="user",
    time="time",
    incentive="amount",
    revenue="revenue",
    order="order",
    numeric=("x", "y"),
    categorical=("city", "plan"),
    cost="cost",
    objectives=(Objective("click"), Objective("minutes", "amount")),
    multiplier="lambda",
    propensity="propensity",
)


def columns(users: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Return the columns of SCHEMA for the given user of each row, in a random order of time with ties."""
    rng = np.random.default_rng(seed)
    n = len(users)
    x = rng.normal(size=n).astype(np.float32)
    x[rng.random(n) < 0.2] = np.nan
    city = rng.choice(np.array(["Lagos", "Lima", "Lyon", None], dtype=object), n)
    return {
        "user": np.asarray(users),
        "time": rng.integers(0, max(2, n // 2), n).astype(np.float64),
        "order": rng.permutation(n),
        "amount": rng.integers(0, 9, n).astype(np.float64),
        "revenue": rng.exponential(3, n).round(2),
        "x": x,
        "y": rng.integers(-3, 4, n),
        "city": city,
        "plan": rng.integers(1, 12, n),
        "cost": rng.exponential(1, n).round(2),
        "click": rng.random(n) < 0.5,
        "minutes": rng.integers(0, 60, n),
        "lambda": rng.choice([0.0, 0.5, 1.0], n),
        "propensity": rng.uniform(0.01, 1, n),
    }


def make_log(events: int = 60, users: int = 7, *, seed: int = 0) -> InteractionLog:
    """Return a log of SCHEMA."""
    rng = np.random.default_rng(seed + 1000)
    return InteractionLog.from_columns(SCHEMA, columns(rng.integers(0, users, events), seed=seed))


logs = st.builds(make_log, st.integers(1, 60), st.integers(1, 12), seed=st.integers(0, 10_000))

ARRAYS = ("time", "numeric", "categorical", "incentives", "revenue", "cost", "objectives", "multiplier", "propensity")


def assert_same(first: InteractionLog, second: InteractionLog) -> None:
    """Assert that two logs hold the same, bit for bit."""
    assert first.schema == second.schema
    assert first.categories == second.categories
    for name in ("user_ids", "offsets", *ARRAYS):
        left, right = getattr(first, name), getattr(second, name)
        if left is None or right is None:
            assert left is right, name
        else:
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)
