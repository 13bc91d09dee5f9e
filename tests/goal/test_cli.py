"""The `goal` command."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goal import cli
from goal.cli import COMMANDS, main
from goal.log import Schema, read
from goal.tokenizer import IncentiveTokenizer


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"goal {version('goal-incentives')}\n"


def test_simulate_writes_a_log_and_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "log.parquet"
    main(["simulate", "--out", str(path), "--users", "5", "--seed", "3", "--behaviour", "uniform"])
    log = read(path, Schema.load(path.with_suffix(".toml")))
    assert log.events == 500 and log.users == 5
    assert "500 events of 5 users" in capsys.readouterr().out


def test_a_vocabulary_does_not_replace_that_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    pq.write_table(pa.table({"coins": [1, 2]}), tmp_path / "coins.parquet")
    arguments = ["--amounts", str(tmp_path / "coins.parquet"), "--column", "coins", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["vocabulary", *arguments])
    assert "holds a run, whose vocabulary would be replaced" in capsys.readouterr().err
    assert not (tmp_path / "vocabulary.json").exists()


def test_a_vocabulary_is_built_from_a_folder_of_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    amounts = np.random.default_rng(0).integers(0, 500, size=4000)
    for part, values in enumerate(np.split(amounts, 2)):
        pq.write_table(pa.table({"coins": values}), folder / f"{part}.parquet", row_group_size=300)
    out = tmp_path / "out"
    main(["vocabulary", "--amounts", str(folder), "--column", "coins", "--out", str(out)])
    written = IncentiveTokenizer.load(out)
    assert written.values.tolist() == IncentiveTokenizer.fit(amounts).values.tolist()
    assert "4000 amounts" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["vocabulary.json"]  # no run was started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vocabulary", "--column", "coins"], "--amounts FILE and --column NAME belong together"),
        (
            ["vocabulary", "--amounts", "nowhere.parquet", "--column", "coins"],
            "nowhere.parquet: no such file",
        ),
        (["run", "--environment", "paradise"], "paradise"),
        (["run", "--log", "nowhere.parquet"], "expected --log and --schema together, or neither"),
        (["run", "--log", "nowhere.parquet", "--schema", "nowhere.toml"], "nowhere.toml: cannot read the schema"),
        (
            ["run", "--environment", "paper", "--log", "nowhere.parquet", "--schema", "nowhere.toml"],
            "environment='paper': expected None beside log=nowhere.parquet: they exclude each other",
        ),
        (
            ["run", "--environment", "calibrated", "--log", "nowhere.parquet", "--schema", "nowhere.toml"],
            "environment='calibrated': expected None beside log=nowhere.parquet: they exclude each other",
        ),
        (["simulate", "--out", "log.toml"], "--out log.toml: expected a name that ends in .parquet or .pq"),
        (["simulate", "--out", "log.csv"], "such as log.parquet"),
        (["simulate", "--out", "log"], "such as log.parquet"),
        (["simulate", "--environment", "shop.toml", "--out", "./shop.parquet"], "would replace the environment"),
        (["scpo", "--out", "nowhere"], "config.json: not found"),
        (["run", "--roi-target", "-1"], "roi_target=-1.0: expected positive"),
        (["run", "--threads", "0"], "threads=0: expected None or at least 1"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "--out", "log.parquet"], "starts from the beginning"),
        (["vocabulary", "--amounts", "log.parquet", "--column", "coins"], "starts from the beginning"),
        (["evaluate", "--out", "run"], "starts from the beginning"),
        (["scpo", "--out", "run"], "goes on where this one stopped"),
        (["run"], "goes on where this one stopped"),
    ],
)
def test_an_interruption_says_what_the_same_command_does(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_execute", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 130
    assert capsys.readouterr().err == f"goal: interrupted; the same command {expected}\n"
