"""Amounts of a whole log at once: what a finished run's policy pays at the last event of every user."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from goal.data import schema_of
from goal.errors import ConfigurationError
from goal.files import write_atomically
from goal.log import Schema, Windows, read
from goal.pipeline import Run
from goal.results.estimates import allocate


def allocate_log(
    run: Run, log: str | Path, *, schema: str | Path | None = None, multiplier: float | None = None
) -> pa.Table:
    """Return what the policy pays each user of a log at the user's last event.

    That event is the pending one: its features count, its amount and its outcomes are not looked at (0 will do).

    Args:
        run: whose policy is asked; calibrated, unless a multiplier is given.
        log: Parquet file or folder, or CSV, with the events of each user up to the pending one.
        schema: TOML file that names the roles of its columns; None: that of the run's own log.
        multiplier: at least 0; None: the calibrated one.

    Returns:
        One row a user under the schema's names: user, time (as `InteractionLog.time` counts it) and incentive, the
        amount; and `multiplier`.

    Raises:
        ConfigurationError: a stage that is needed has not ended, the log has other features than the policy was made
            for, or the multiplier cannot work.
        SchemaError, LogError: schema or log cannot be read.
    """
    run.need("scpo")
    if multiplier is None:
        run.need("calibration")
        multiplier = float(run.read("calibration.json")["multiplier"])
    if not (np.isfinite(multiplier) and multiplier >= 0):
        raise ConfigurationError(f"multiplier={multiplier}: expected a finite number of at least 0")
    policy = run.policy("policy")
    learned = schema_of(run.config)
    roles = learned if schema is None else Schema.load(schema)
    for name in ("numeric", "categorical", "objectives"):
        known, given = getattr(learned, name), getattr(roles, name)
        if known != given:
            raise ConfigurationError(f"schema: {name} is {list(given)}; the policy learned from {list(known)}")
    events = read(log, roles, categories=policy.config.categories)
    last = events.offsets[1:] - 1
    amounts = allocate(policy, Windows(events, last, length=policy.config.window), multiplier)
    return pa.table(
        {
            roles.user: pa.array(events.user_ids),
            roles.time: events.time[last],
            roles.incentive: amounts,
            "multiplier": np.full(len(last), multiplier),
        }
    )


def write_amounts(table: pa.Table, path: Path) -> None:
    """Write the result of `allocate_log` as a Parquet file, whole or not at all."""
    content = io.BytesIO()
    pq.write_table(table, content)
    write_atomically(path, content.getvalue())
