"""A whole run, small: what it leaves, and what a killed one ends with."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from goal import Policy
from goal.cli import _print_summary as print_summary
from goal.config import (
    ConstraintConfig,
    EvaluationConfig,
    RunConfig,
)
from goal.data import Data, Stream, seed_of
from goal.errors import ConfigurationError
from goal.pipeline import STAGES, Run
from goal.reward import RewardModel
from goal.serialization import dumps, from_dict
from goal.simulator import preset, simulate
from goal.training.metrics import explain

from .tiny import REMEMBERING, TINY

pytestmark = pytest.mark.xdist_group("run")  # one worker makes the finished run for all of them


def test_it_leaves_what_the_contract_says(finished: Path) -> None:
    for name in ("config.json", "vocabulary.json", "metrics.jsonl", "report.html", "summary.json"):
        assert (finished / name).stat().st_size > 0
    assert list((finished / "plots").glob("*.png"))
    rows = json.loads((finished / "evaluation.json").read_text())["diagnostics"]["promises"]
    assert [row["step"] for row in rows[::3]] == [0, 20, 40, 60, 80, 100], "steps planned ahead"
    promised = [row["expected_value"] for row in rows]
    assert all(later > earlier for earlier, later in zip(promised, promised[3:], strict=False))
    assert (finished / "plots" / "promises.png").stat().st_size > 0
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) >= {
        "roi_target", "multiplier", "rev", "cost", "roi", "rvr", "sweep", "wall_seconds", "device", "versions",
    }  # fmt: skip
    assert [row["multiplier"] for row in summary["sweep"]] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    for row in summary["sweep"]:
        assert set(row) == {"multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value"}
        assert row["value"] == pytest.approx(row["rev"] - row["multiplier"] * row["cost"])
        assert row["value"] <= row["oracle_value"] + 0.5 and row["reference_value"] <= row["oracle_value"] + 1e-9
    assert {"oracle_rvr", "window", "stride"} <= set(summary)
    assert isinstance(Policy.from_pretrained(finished / "policy"), Policy)
    stages = {line["stage"] for line in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())}
    assert stages == {"pretraining", "pscore", "value", "scpo"}


def test_the_report_shows_how_scpo_went_and_every_objective(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    for metric in ("kl", "ratio max", "ratio min", "clip fraction", "entropy", "zero variance share", "amount"):
        assert f" {metric}: {explain('scpo', metric.replace(' ', '_'))}." in page, metric
    assert "more metrics are in" not in page
    checked = json.loads((finished / "evaluation.json").read_text())["diagnostics"]["reward_calibration"]
    assert [item["objective"] for item in checked] == ["revenue", "engaged"]
    run = Run.open(finished)
    met = simulate(preset("calibrated"), users=12, seed=seed_of(run.config.seed, Stream.TEST))
    for item, outcome in zip(checked, (met.revenue, met.objectives[:, 0]), strict=True):
        mean = np.average(item["observed"], weights=item["count"])
        assert sum(item["count"]) == met.events and mean == pytest.approx(outcome.mean(), rel=1e-6)


def test_what_is_printed_at_the_end(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    summary |= {"multiplier": 1.5, "roi": 3.25, "rvr": 0.125, "window": 1000, "stride": 250, "oracle_rvr": 0.25}

    def printed(**changes: object) -> str:
        print_summary({name: value for name, value in {**summary, **changes}.items() if value != "none"}, finished)
        return " ".join(capsys.readouterr().out.split())

    line = "ROI violation rate 12.5% of windows of 1,000 interactions, one every 250"
    assert f"{line}; the oracle's at the same ROI 25.0%" in printed() and "multiplier 1.500: ROI 3.250" in printed()
    alone = printed(oracle_rvr=None, roi=None, estimate=True)
    assert f"{line} (estimates by the reward model)" in alone and "no cost against a target" in alone
    assert "violation" not in printed(window="none"), "of a run of an earlier version"


def test_training_does_not_ask_the_simulator(finished: Path, tmp_path: Path) -> None:
    """The log alone, without the environment that it came from, gives the same policy."""
    run = Run(TINY, tmp_path)
    run.data = dataclasses.replace(Run.open(finished).data, parameters=None)
    run.run(until="scpo")
    here, there = (load_file(folder / "policy" / "model.safetensors") for folder in (tmp_path, finished))
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_a_finished_run_is_not_run_again(finished: Path) -> None:
    before = (finished / "summary.json").stat().st_mtime_ns
    Run(TINY, finished).run()
    assert (finished / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("stopped_in", "past"),
    [
        ("pretraining", False),
        ("pscore", False),
        ("value", True),
        ("scpo", False),
        ("scpo", True),
        ("calibration", False),
    ],
)
def test_a_run_that_stopped_ends_with_the_same_result(
    stopped_in: str, past: bool, finished: Path, remembering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    whole, config = (remembering, REMEMBERING) if past else (finished, TINY)
    with monkeypatch.context() as patch:
        if stopped_in == "calibration":

            def stop(run: Run) -> None:
                raise Stopped

            patch.setattr(Run, stopped_in, stop)
        else:
            from goal.training import Loop

            save = Loop._save

            def save_and_stop(self: Loop, stage, optimiser, generator, step: int, seconds: float) -> None:
                save(self, stage, optimiser, generator, step, seconds)
                if stage.name == stopped_in and step == 2:
                    raise Stopped

            patch.setattr(Loop, "_save", save_and_stop)
        with pytest.raises(Stopped):
            Run(config, tmp_path).run()
    Run(config, tmp_path).run(until="evaluation")
    uninterrupted, resumed = (load_file(folder / "policy" / "model.safetensors") for folder in (whole, tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in uninterrupted.items())
    for name in ("calibration.json", "evaluation.json"):
        assert (whole / name).read_text() == (tmp_path / name).read_text()


def test_a_process_that_was_killed_in_training_ends_with_the_same_policy(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "policy")
    checkpoint = tmp_path / "checkpoints" / "scpo.checkpoint"
    checkpoint.unlink()
    ended = json.loads((tmp_path / "stages.json").read_text())
    (tmp_path / "stages.json").write_text(json.dumps({stage: ended[stage] for stage in STAGES[:3]}))
    script = (
        "import sys, time; from goal.pipeline import Run; from goal.training import Loop; save = Loop._save;"
        "Loop._save = lambda *arguments: (save(*arguments), time.sleep(0.5));"
        "Run.open(sys.argv[1]).run(until='scpo')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (
        torch.load(checkpoint, weights_only=True)["step"] < TINY.scpo.loop.steps and not (tmp_path / "policy").exists()
    )
    Run.open(tmp_path).run(until="scpo")
    whole, resumed = (load_file(folder / "policy" / "model.safetensors") for folder in (finished, tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["stage"] == "scpo"] == list(range(TINY.scpo.loop.steps))


def test_a_reward_model_without_snapshots_is_evaluated_all_the_same(remembering: Path, tmp_path: Path) -> None:
    rows = json.loads((remembering / "evaluation.json").read_text())["diagnostics"]["promises"]
    assert [row["step"] for row in rows[::3]] == [0, 1, 2, 3, 4], "steps of training"
    assert len({row["expected_value"] for row in rows}) == len(rows)
    shutil.copytree(remembering, tmp_path / "run")
    for path in (tmp_path / "run" / "reward").glob("value-*.safetensors"):
        path.unlink()
    run = Run.open(tmp_path / "run")
    run.run_stage("evaluation", again=True)
    rows = run.read("evaluation.json")["diagnostics"]["promises"]
    assert {row["step"] for row in rows} == {TINY.reward.value.steps}
    run.run_stage("report")


def test_an_episode_of_one_step_has_nothing_to_look_ahead_to(tmp_path: Path) -> None:
    (tmp_path / "once.toml").write_text('preset = "calibrated"\n[parameters]\nhorizon = 1\n')
    run = Run(dataclasses.replace(TINY, environment=str(tmp_path / "once.toml")), tmp_path / "run")
    run.run()
    assert not run.reward.looks_ahead


def test_a_stage_asks_for_the_ones_before_it(tmp_path: Path) -> None:
    run = Run(TINY, tmp_path)
    with pytest.raises(ConfigurationError, match="'vocabulary' has not ended"):
        run.run_stage("scpo")
    with pytest.raises(ConfigurationError, match="not found"):
        Run.open(tmp_path / "nothing")


def scpo_steps(folder: Path) -> int:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return 1 + max(line["step"] for line in lines if line["stage"] == "scpo")


def test_steps_of_scpo_are_repeated_where_a_state_is_one_event(remembering: Path, tmp_path: Path) -> None:
    assert scpo_steps(remembering) == REMEMBERING.scpo.loop.steps
    Run(dataclasses.replace(TINY, scpo=REMEMBERING.scpo), tmp_path).run("scpo")
    assert scpo_steps(tmp_path) == 2 * TINY.scpo.loop.steps


@pytest.mark.parametrize("listed", [True, False])
def test_no_more_than_the_maximum_amount_is_paid(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not listed:
        monkeypatch.setattr("goal.data.MOST_LISTED_AMOUNTS", 0)
    run = Run(dataclasses.replace(TINY, maximum_amount=3.5), tmp_path)
    run.run("scpo")
    assert run.data.log.incentives.max() == 10, "the log may hold more"
    policy, history = run.policy("policy"), run.data.windows(run.data.splits.training[::7], 4).batch(np.arange(40))
    assert (policy.config.allowed_amounts is not None) is listed
    drawn = policy.generate(history, torch.zeros(40), samples=50, greedy=False).amounts
    assert 0 < float(drawn.max()) <= 3.5 and float(run.reward.grid.max()) == 3
    with pytest.raises(ConfigurationError, match=r"maximum_amount=0\.5: the smallest amount of the log is 1"):
        Run(dataclasses.replace(TINY, maximum_amount=0.5), tmp_path / "none").run("pretraining")
    with pytest.raises(ConfigurationError, match="maximum_amount=0: expected None or positive and finite"):
        dataclasses.replace(TINY, maximum_amount=0)


def test_every_metric_is_explained(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    names = {(line["stage"], name) for line in lines for name in line if name not in ("stage", "step")}
    assert {stage for stage, _ in names} == {"pretraining", "pscore", "value", "scpo"}
    assert [pair for pair in sorted(names) if explain(*pair) is None] == []


def test_configuration_survives_json() -> None:
    assert from_dict(RunConfig, json.loads(dumps(TINY))) == TINY
    with pytest.raises(ConfigurationError, match="unknown setting 'scop'"):
        from_dict(RunConfig, {"scop": {}})


@pytest.mark.parametrize(("most", "read"), [(3000, 3000), (2000, 1500)])
def test_candidates_are_found_on_no_more_states_than_said(
    finished: Path, monkeypatch: pytest.MonkeyPatch, most: int, read: int
) -> None:
    run, rows = Run.open(finished), []
    windows = Data.windows
    monkeypatch.setattr("goal.pipeline.MOST_STATES", most)
    monkeypatch.setattr(
        Data, "windows", lambda self, given, length: (rows.append(len(given)), windows(self, given, length))[1]
    )
    run._candidates(run.reward)
    assert rows == [read]


class ExactResponse:
    """What a reward model of `calibrated` is asked for when candidates are looked for, by the environment's formula;
    one state in 250 brings a hundred times as much."""

    window = 1
    pscore = SimpleNamespace(state=SimpleNamespace(pending=lambda history: history.numeric[:, -1, :1].double()))

    def __init__(self, revenue: float) -> None:
        self.revenue = revenue

    def immediate(self, fatigue: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amounts = torch.arange(11, dtype=torch.float64)
        revenue = self.revenue * torch.sigmoid(-3 + 0.8 * amounts - 1.2 * fatigue)
        revenue[::250] *= 100
        return revenue, amounts.expand(len(fatigue), -1)


@pytest.mark.parametrize(
    ("target", "step", "revenue", "top", "count"),
    [
        (3.0, 0.5, 30, 4.10, 10),
        (2.0, 0.5, 30, 4.10, 10),
        (3.0, 0.1, 30, 4.10, 22),
        (6.0, 1.0, 30, 6, 7),
        (6.0, 1.0, 60, 8.2, 10),
        (3.0, 0.5, 60, 4.5, 10),
        (6.0, 1.0, 90, 9, 10),
    ],
)
def test_candidates_reach_the_threshold_of_proposition_1_or_its_cap(
    target: float, step: float, revenue: float, top: float, count: int, finished: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(TINY, roi_target=target, constraint=dataclasses.replace(TINY.constraint, step=step))
    run = Run(config, tmp_path)
    run.data = Run.open(finished).data
    found = run._candidates(cast(RewardModel, ExactResponse(revenue)))
    assert len(found) == count and found[-1] == pytest.approx(top, abs=0.01)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"confidence=2\.0: expected None or in \(0\.5, 1\)"):
        ConstraintConfig(confidence=2.0)
    with pytest.raises(ConfigurationError, match="users=0: expected None or at least 1"):
        EvaluationConfig(users=0)


def test_stages_are_in_order() -> None:
    assert STAGES == ("vocabulary", "pretraining", "reward", "scpo", "calibration", "evaluation", "report")
