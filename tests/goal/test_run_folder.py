"""What a run's folder takes and refuses: other settings, other sources, broken and edited files."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from goal.errors import ConfigurationError
from goal.pipeline import Run

from .tiny import TINY

pytestmark = pytest.mark.xdist_group("run")  # one worker makes the finished run for all of them


def test_other_settings_in_the_same_folder_are_refused(finished: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"roi_target=3\.0, this one has 2\.5"):
        Run(dataclasses.replace(TINY, roi_target=2.5), finished)


def test_a_reward_model_of_another_shape_is_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "reward" / "model.safetensors"
    weights = load_file(path)
    weights.pop("pscore.later.weight")
    save_file(weights, path)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: .*written by another version .*another folder"):
        _ = Run.open(tmp_path / "run").reward


def test_only_what_is_measured_may_change_later(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    settings = dataclasses.replace(TINY.evaluation, users=15, rvr_window=5000, rvr_stride=None)
    run = Run(dataclasses.replace(TINY, evaluation=settings), folder)
    assert "calibration" in run.seconds and "evaluation" not in run.seconds
    run.run()
    headline = run.read("evaluation.json")["headline"]
    assert (headline["users"], headline["window"], headline["stride"]) == (15, 1500, 375)  # one window, all there is


def test_a_folder_where_nothing_has_ended_takes_other_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Run(dataclasses.replace(TINY, environment="paradise"), tmp_path).run()
    Run(TINY, tmp_path).run(until="vocabulary")


def test_training_under_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    """The only stage that has ended is forgotten; what pretraining left is of the former settings, target and all."""
    environment = tmp_path / "mine.toml"
    environment.write_text('preset = "calibrated"\n')
    config, folder = dataclasses.replace(TINY, environment=str(environment)), tmp_path / "run"
    Run(config, folder).run(until="pretraining")
    checkpoint, metrics = folder / "checkpoints" / "pretraining.checkpoint", folder / "metrics.jsonl"
    (folder / "stages.json").unlink()
    Run(config, folder)
    assert checkpoint.is_file() and metrics.is_file()
    kept = checkpoint.read_bytes()
    Run(dataclasses.replace(config, roi_target=4.0), folder)
    assert not checkpoint.exists() and not metrics.exists()
    checkpoint.write_bytes(kept)
    environment.write_text('preset = "calibrated"\n[parameters]\neta = 0.03\n')
    Run(dataclasses.replace(config, roi_target=4.0), folder)
    assert not checkpoint.exists()


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "pretraining.checkpoint"
    checkpoint.parent.mkdir()
    for content in (b"nonsense", _torch_file({"weights": 1})):
        checkpoint.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"pretraining\.checkpoint: (broken|not a checkpoint); delete it"):
            Run(TINY, tmp_path).run(until="pretraining")


def _torch_file(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_a_summary_of_former_settings_is_not_that_of_a_new_run(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "stages.json").unlink()
    assert Run(dataclasses.replace(TINY, roi_target=2.5), folder).run(until="vocabulary") == {}


def test_a_run_does_not_go_on_with_another_version_of_its_sources(tmp_path: Path) -> None:
    environment = tmp_path / "mine.toml"
    environment.write_text('preset = "calibrated"\n')
    config = dataclasses.replace(TINY, environment=str(environment))
    Run(config, tmp_path / "run").run(until="vocabulary")
    Run(config, tmp_path / "run")
    environment.write_text('preset = "calibrated"\n[parameters]\neta = 0.03\n')
    with pytest.raises(ConfigurationError, match=r"mine\.toml has changed since .* choose another --out"):
        Run(config, tmp_path / "run")
    environment.unlink()
    Run.open(tmp_path / "run")  # what asks for the environment will say that it is gone


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    Run(TINY, tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_text()
    path.write_text(whole[:40])
    for start in (lambda: Run.open(tmp_path), lambda: Run(TINY, tmp_path)):
        with pytest.raises(ConfigurationError, match=r"config\.json: not JSON: .*; mend it"):
            start()
    for change, message in (
        ({"seed": "0"}, "RunConfig: seed='0': a str came; expected int"),
        ({"scpo": 3}, "RunConfig: scpo=3: a int came; expected ScpoConfig"),
        ({"pretraining": {"loop": {"steps": 3}}}, "LoopConfig: the setting 'batch_size' is missing"),
        ({"roi_target": -1}, "roi_target=-1: expected positive"),
    ):
        path.write_text(json.dumps({**json.loads(whole), **change}))
        with pytest.raises(ConfigurationError, match=rf"config\.json: {message}.*; mend it"):
            Run.open(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config\.json: holds a list; expected a JSON object"):
        Run.open(tmp_path)
    path.write_text(whole)
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"stages\.json: not JSON: .*; delete .*stages\.json"):
        Run.open(tmp_path).run_stage("vocabulary")
    with pytest.raises(ConfigurationError, match=r"evaluation\.json: not found; delete .*stages\.json"):
        Run.open(tmp_path).read("evaluation.json")


def test_a_result_that_somebody_edited_is_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for name, field, value, stage, remedy in (
        ("calibration.json", "multiplier", "2", "evaluation", "goal calibrate"),
        ("calibration.json", "multiplier", -1, "evaluation", "goal calibrate"),
        ("calibration.json", "confidence", "high", "evaluation", "goal calibrate"),
        ("calibration.json", "evaluations", None, "report", "goal calibrate"),
        ("calibration.json", "feasible", 1, "evaluation", "goal calibrate"),
        ("evaluation.json", "sweep", {}, "report", "delete"),
        ("reward/config.json", "multipliers", 3, "calibration", "delete"),
        ("reward/config.json", "multipliers", [0.0, None], "calibration", "delete"),
    ):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(json.dumps({**json.loads(whole), field: value}))
        with pytest.raises(
            ConfigurationError, match=rf"{name}: {field}={re.escape(repr(value))}; expected .*; .*{remedy}"
        ):
            Run.open(tmp_path).run_stage(stage, again=True)
        (tmp_path / name).write_text(whole)
        (tmp_path / "stages.json").write_bytes((finished / "stages.json").read_bytes())
