"""The loop: schedule, checkpoints, and a run killed in the middle."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from goal.config import LoopConfig
from goal.errors import ConfigurationError
from goal.training import Loop, MetricsFile
from goal.training.loop import learning_rate_factor


class Regression:
    """Fits a line to random points; dropout draws on the global generator too."""

    name = "regression"

    def __init__(self, pause: float = 0.0) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.pause = pause

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        time.sleep(self.pause)
        x = torch.randn(16, 4, generator=generator)
        for _ in range(2):
            error = (self.module(x)[:, 0] - x.sum(dim=1)).square().mean()
            yield error, {"error": error.detach()}

    def after_step(self) -> None:
        pass


CONFIG = LoopConfig(steps=60, batch_size=16, learning_rate=1e-2, warmup_steps=5, log_every=1, checkpoint_seconds=0.0)


def train(folder: Path, *, pause: float = 0.0, config: LoopConfig = CONFIG) -> dict[str, torch.Tensor]:
    stage = Regression(pause)
    Loop(config, folder=folder, metrics=MetricsFile(folder / "metrics.jsonl"), seed=7).run(stage)
    return stage.module.state_dict()


def test_it_learns(tmp_path: Path) -> None:
    train(tmp_path)
    errors = [line["error"] for line in MetricsFile(tmp_path / "metrics.jsonl").read()]
    assert len(errors) == 60 and sum(errors[-5:]) < 0.5 * sum(errors[:5])


def test_killed_and_started_again_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    folder = tmp_path / "killed"
    script = (
        f"import importlib.util, pathlib; spec = importlib.util.spec_from_file_location('t', {__file__!r});"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t);"
        f"t.train(pathlib.Path({str(folder)!r}), pause=0.05)"
    )
    metrics = folder / "metrics.jsonl"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while (not metrics.is_file() or len(metrics.read_text().splitlines()) < 15) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    reached = len(metrics.read_text().splitlines())
    assert 15 <= reached < 60
    resumed = train(folder)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name])
    steps = [line["step"] for line in MetricsFile(metrics).read()]
    assert steps == list(range(60))
    assert Loop(CONFIG, folder=folder, seed=7).run(Regression()) > reached * 0.05, "the killed process counts"


def test_what_comes_before_a_step_sees_the_weights_before_it(tmp_path: Path) -> None:
    stage, seen = Regression(), {}
    before = {step: lambda step=step: seen.update({step: stage.module[0].weight.sum().item()}) for step in (0, 1, 59)}
    first = stage.module[0].weight.sum().item()
    Loop(CONFIG, folder=tmp_path, seed=7).run(stage, before=before)
    assert list(seen) == [0, 1, 59] and seen[0] == first
    assert len({*seen.values(), stage.module[0].weight.sum().item()}) == 4


def test_a_half_written_line_is_dropped(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append("a", 0, {"loss": 1.0})
    file.append("b", 0, {"loss": 2.0})
    file.append("a", 1, {"loss": 3.0})
    with file.path.open("a") as handle:
        handle.write('{"stage": "a", "st')
    file.rewind("a", 2)  # nothing but the half line goes, and what comes next has a line of its own
    file.append("a", 2, {"loss": 4.0})
    assert [line["loss"] for line in file.read()] == [1.0, 2.0, 3.0, 4.0]
    file.rewind("a", 1)
    assert file.read() == [{"stage": "a", "step": 0, "loss": 1.0}, {"stage": "b", "step": 0, "loss": 2.0}]
    assert all(json.loads(line) for line in file.path.read_text().splitlines())


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ConfigurationError, match="written by other settings"):
        train(tmp_path, config=LoopConfig(steps=61, batch_size=16))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    stage = Regression()
    stage.module[0] = nn.Linear(4, 7)
    with pytest.raises(ConfigurationError, match="written by another version of the package"):
        Loop(CONFIG, folder=tmp_path, seed=7).run(stage)


def test_schedule() -> None:
    config = LoopConfig(steps=100, batch_size=1, learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10)
    factors = [learning_rate_factor(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert factors[99] == pytest.approx(0.1, abs=1e-3)


def test_a_loss_that_is_not_finite_names_stage_and_step() -> None:
    class Broken(Regression):
        def losses(
            self, generator: torch.Generator, progress: float
        ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
            yield self.module(torch.full((1, 4), torch.inf)).sum(), {}

    with pytest.raises(FloatingPointError, match="regression, step 0"):
        Loop(CONFIG).run(Broken())


class BadGradient(Regression):
    """From some step on the loss stays finite and its gradient is not: the root of 0."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.step = first, 0

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        output = self.module(torch.randn(16, 4, generator=generator))
        self.step += 1
        yield (output.square().mean() if self.step <= self.first else (0 * output).mean().sqrt()), {}


def test_a_gradient_that_is_not_finite_reaches_neither_weights_nor_checkpoint(tmp_path: Path) -> None:
    stage = BadGradient(first=3)
    with pytest.raises(FloatingPointError, match="regression, step 3: gradient norm is nan"):
        Loop(CONFIG, folder=tmp_path).run(stage)
    kept = torch.load(tmp_path / "regression.checkpoint", weights_only=True)
    assert kept["step"] == 3
    for name, value in stage.module.state_dict().items():
        assert value.isfinite().all() and torch.equal(value, kept["module"][name])


def test_no_checkpoint_follows_a_gradient_that_was_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no step is looked at, as on a GPU, one bad gradient is found before the next checkpoint."""
    looked = Loop._require_finite
    monkeypatch.setattr(Loop, "_require_finite", lambda *arguments: None)  # steps 0 to 6 as if none were logged
    stage = BadGradient(first=3)

    def look_from_now_on() -> None:
        monkeypatch.setattr(Loop, "_require_finite", staticmethod(looked))
        for parameter in stage.module.parameters():  # weights that hide it
            parameter.data.fill_(0.1)
        stage.first = 100

    config = dataclasses.replace(CONFIG, checkpoint_seconds=math.inf)
    with pytest.raises(FloatingPointError, match="regression, step 7: gradient norm is nan"):
        Loop(config, folder=tmp_path).run(stage, before={7: look_from_now_on})
    assert not (tmp_path / "regression.checkpoint").exists()


def test_only_the_forward_pass_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_autocast", lambda self, device: torch.autocast("cpu", dtype=torch.bfloat16))
    seen: dict[str, set[bool]] = {"forward": set(), "backward": set(), "optimiser": set()}

    class Watched(Regression):
        def losses(
            self, generator: torch.Generator, progress: float
        ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
            x, outputs = torch.randn(16, 4, generator=generator), []
            for _ in range(2):
                output = self.module[0](x)
                outputs.append(output.detach())
                seen["forward"].add(torch.is_autocast_enabled("cpu"))
                output.register_hook(lambda gradient: seen["backward"].add(torch.is_autocast_enabled("cpu")))
                yield output.float().square().mean(), {}
            assert not torch.equal(*outputs)  # the second loss is one of the new weights

    hook = register_optimizer_step_pre_hook(lambda *arguments: seen["optimiser"].add(torch.is_autocast_enabled("cpu")))
    try:
        Loop(dataclasses.replace(CONFIG, steps=3, learning_rate=0.1)).run(Watched())
    finally:
        hook.remove()
    assert seen == {"forward": {True}, "backward": {False}, "optimiser": {False}}
