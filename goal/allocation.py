"""Amounts of a whole log at once: what a finished run's policy pays at the last event of every user."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from goal.errors import ConfigurationError
from goal.files import write_atomically
from goal.log import Schema, Windows, read
from goal.model import Policy
from goal.results.estimates import allocate
from goal.run_folder import POLICY_SCHEMA, read_calibration


def allocate_log(
    folder: str | Path, log: str | Path, *, multiplier: float, schema: str | Path | None = None
) -> pa.Table:
    """Return what the policy of a run pays each user of a log at the user's last event.

    That event is the pending one: its features count, its amount and its outcomes are not looked at (0 will do).
    Nothing of the run but its policy is needed, wherever the folder lies now.

    Args:
        folder: of the run.
        log: Parquet file or folder, or CSV, with the events of each user up to the pending one.
        multiplier: at least 0; see `calibrated_multiplier`.
        schema: TOML file that names the roles of its columns; None: that of the run's own log. Costs, propensities and
            logged multipliers are not read.

    Returns:
        One row a user under the schema's names: user, time (as `InteractionLog.time` counts it) and incentive, the
        amount.

    Raises:
        ConfigurationError: the run has no policy yet, the log has other features than the policy was made for, or the
            multiplier cannot work.
        SchemaError, LogError: schema or log cannot be read.
    """
    folder = Path(folder) / "policy"
    if not 0 <= multiplier <= torch.finfo(torch.float32).max:
        raise ConfigurationError(f"multiplier={multiplier}: expected a finite number of at least 0")
    policy = Policy.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    learned = Schema.load(folder / POLICY_SCHEMA)
    roles = learned if schema is None else Schema.load(schema)
    for name in ("numeric", "categorical", "objectives"):
        known, given = getattr(learned, name), getattr(roles, name)
        if known != given:
            raise ConfigurationError(f"schema: {name} is {list(given)}; the policy learned from {list(known)}")
    roles = dataclasses.replace(roles, cost=None, propensity=None, multiplier=None)
    events = read(log, roles, categories=policy.config.categories)
    last = events.offsets[1:] - 1
    amounts = allocate(policy, Windows(events, last, length=policy.config.window), multiplier)
    columns = {roles.user: pa.array(events.user_ids), roles.time: events.time[last], roles.incentive: amounts}
    return pa.table(columns)


def calibrated_multiplier(folder: str | Path) -> tuple[float, str]:
    """Return the multiplier that calibration found for a run, and a warning, empty where it meets the target.

    Raises:
        ConfigurationError: the run is not calibrated, or its calibration.json is broken.
    """
    found = read_calibration(Path(folder), otherwise=", or give a multiplier")
    return found["multiplier"], "" if found["feasible"] else found["message"]


def write_amounts(table: pa.Table, path: Path) -> None:
    """Write the result of `allocate_log` as a Parquet file, whole or not at all."""
    content = io.BytesIO()
    pq.write_table(table, content)
    write_atomically(path, content.getvalue())
