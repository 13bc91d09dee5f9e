"""Amounts of a whole log at once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from goal import Policy
from goal.cli import main
from goal.log import Schema, Windows, read, write
from goal.pipeline import Run
from goal.simulator import preset, simulate

from .tiny import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a policy and a calibration, and beside it a log of other users as `log.parquet`."""
    folder = tmp_path_factory.mktemp("allocation")
    Run(dataclasses.replace(TINY, network=dataclasses.replace(TINY.network, window=3)), folder / "run").run(
        "calibration"
    )
    log = simulate(preset("calibrated"), "uniform", users=9, seed=5)
    write(log, folder / "log.parquet")
    log.schema.save(folder / "log.toml")
    return folder


def allocated(folder: Path, *arguments: str) -> pa.Table:
    main(["allocate", "--out", str(folder / "run"), "--amounts", str(folder / "amounts.parquet"), *arguments])
    return pq.read_table(folder / "amounts.parquet")


def test_every_user_gets_what_the_policy_pays_at_the_last_event(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = allocated(folder, "--log", str(folder / "log.parquet"))
    multiplier = json.loads((folder / "run" / "calibration.json").read_text())["multiplier"]
    assert "amounts of 9 users" in capsys.readouterr().out
    policy = Policy.from_pretrained(folder / "run" / "policy").eval()
    log = read(folder / "log.parquet", Schema.load(folder / "log.toml"))
    last = log.offsets[1:] - 1
    history = Windows(log, last, length=policy.config.window).batch(np.arange(9))
    expected = policy.allocate(history, torch.full((9,), multiplier))
    assert table.column(log.schema.incentive).to_pylist() == expected.tolist()
    assert table.column(log.schema.user).to_pylist() == log.user_ids.tolist()
    assert table.column(log.schema.time).to_pylist() == log.time[last].tolist()


def test_what_the_last_event_says_of_amount_and_outcome_is_not_looked_at(folder: Path) -> None:
    log = read(folder / "log.parquet", Schema.load(folder / "log.toml"))
    last = log.offsets[1:] - 1
    revenue, incentives = log.revenue.copy(), log.incentives.copy()
    revenue[last], incentives[last] = 1e6, 0.0
    without = dataclasses.replace(log.schema, propensity=None)  # which no pending event has
    pending = dataclasses.replace(log, schema=without, revenue=revenue, incentives=incentives, propensity=None)
    write(pending, folder / "pending.parquet")
    given = ("--multiplier", "0.5")
    tables = [allocated(folder, "--log", str(folder / name), *given) for name in ("log.parquet", "pending.parquet")]
    assert tables[0].equals(tables[1])


def test_mistakes_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = Schema.load(folder / "log.toml")
    dataclasses.replace(schema, numeric=schema.numeric[::-1]).save(tmp_path / "other.toml")
    log = ["--log", str(folder / "log.parquet")]
    out = ["--out", str(folder / "run"), "--amounts", str(tmp_path / "amounts.parquet")]
    for arguments, message in (
        ([*out, *log, "--schema", str(tmp_path / "other.toml")], "schema: numeric is"),
        ([*out, *log, "--multiplier", "-1"], "multiplier=-1.0: expected a finite number of at least 0"),
        ([*out, "--log", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["--out", str(folder / "run"), *log, "--amounts", str(tmp_path / "amounts.csv")], "ends in .parquet or .pq"),
        ([*out, *log, "--multiplier", "1e39"], "multiplier=1e+39: expected a finite number"),
        (
            ["--out", str(folder / "run"), *log, "--amounts", str(folder / "log.parquet")],
            "is the log, or would be read",
        ),
        ([*out[:3], str(folder / "new.parquet"), "--log", str(folder)], "would be read as a part of it"),
        (["--out", str(tmp_path), *log, "--amounts", str(tmp_path / "amounts.parquet")], "calibration.json: not found"),
        (
            ["--out", str(tmp_path), *log, "--amounts", str(tmp_path / "amounts.parquet"), "--multiplier", "1"],
            "policy",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["allocate", *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.glob("amounts*")) == []


def test_an_infeasible_calibration_is_said_and_one_column_may_be_called_multiplier(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "run" / "policy", moved / "policy")
    found = json.loads((folder / "run" / "calibration.json").read_text())
    (moved / "calibration.json").write_text(json.dumps({**found, "feasible": False, "message": "No multiplier does."}))
    log = read(folder / "log.parquet", Schema.load(folder / "log.toml"))
    roles = dataclasses.replace(log.schema, incentive="multiplier")
    write(dataclasses.replace(log, schema=roles), tmp_path / "log.parquet")
    roles.save(tmp_path / "log.toml")
    given = ["--log", str(tmp_path / "log.parquet"), "--schema", str(tmp_path / "log.toml")]
    main(["allocate", "--out", str(moved), "--amounts", str(tmp_path / "amounts.parquet"), *given])
    assert "No multiplier does." in capsys.readouterr().err
    table, expected = (
        pq.read_table(tmp_path / "amounts.parquet"),
        allocated(folder, "--log", str(folder / "log.parquet")),
    )
    assert table.column("multiplier").to_pylist() == expected.column("incentive").to_pylist()
