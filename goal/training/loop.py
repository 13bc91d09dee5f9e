"""The one optimisation loop: every stage says what its losses are, the loop does the rest.

A run that is killed at any moment and started again continues from its latest checkpoint and, on the CPU, ends with the
same weights: the checkpoint holds parameters, buffers, optimiser, schedule position and every generator.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from goal.config import LoopConfig
from goal.errors import ConfigurationError
from goal.files import write_atomically

Metrics = dict[str, float]


class Stage(Protocol):
    """What the loop needs to know of a stage."""

    name: str

    @property
    def module(self) -> nn.Module:
        """Everything that a checkpoint must hold; what requires a gradient is optimised."""
        ...

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield the losses of one step; the loop takes one optimiser step for each before asking for the next.

        ``generator`` (on the CPU) is the only source of randomness; ``progress`` runs from 0 to 1 over the loop.
        Metrics are scalar tensors.
        """
        ...

    def after_step(self) -> None:
        """Called after the optimiser steps of one step, e.g. to move a target network."""
        ...


class MetricsFile:
    """Appends one JSON object a line; what a killed run wrote past its checkpoint is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, stage: str, step: int, values: Metrics) -> None:
        """Write one line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")

    def rewind(self, stage: str, step: int) -> None:
        """Drop the lines of ``stage`` from ``step`` on."""
        kept = [line for line in self.read() if not (line["stage"] == stage and line["step"] >= step)]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if self.path.is_file() and self.path.read_bytes() != text:  # also where a killed run left half a line
            write_atomically(self.path, text)

    def read(self) -> list[dict[str, Any]]:
        """Return every complete line."""
        if not self.path.is_file():
            return []
        lines = []
        for text in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:  # the last line of a run killed while writing it
                continue
        return lines


def learning_rate_factor(step: int, config: LoopConfig) -> float:
    """Linear warm-up, then a cosine to `final_learning_rate`; a factor on `learning_rate`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    floor = config.final_learning_rate / config.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Loop:
    """Runs a stage for ``config.steps`` steps.

    Args:
        config: the settings.
        folder: where the checkpoint lies; None keeps none.
        metrics: where metrics go; None drops them.
        seed: of the stage's generator.
        progress: show a progress bar.
    """

    def __init__(
        self,
        config: LoopConfig,
        *,
        folder: Path | None = None,
        metrics: MetricsFile | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        self.config = config
        self.folder = folder
        self.metrics = metrics
        self.seed = seed
        self.progress = progress

    def run(self, stage: Stage, *, before: Mapping[int, Callable[[], None]] | None = None) -> float:
        """Train ``stage.module`` in place.

        Args:
            stage: what to train.
            before: called before the steps of those numbers, from 0 on; a run that goes on after an interruption calls
                again what follows its checkpoint.

        Returns:
            Seconds of training that the checkpoint it went on from had taken; 0 where there was none.

        Raises:
            ConfigurationError: the checkpoint in the folder belongs to other settings.
            FloatingPointError: a loss or a gradient is not finite; the message names stage and step. On the CPU that is
                looked at before the weights change, on a GPU, which would have to be waited for, where metrics are
                logged and before a checkpoint is written.
        """
        parameters = [parameter for parameter in stage.module.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(
            parameters, lr=self.config.learning_rate, betas=(0.9, 0.99), weight_decay=self.config.weight_decay,
            foreach=True,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(self.seed)
        began = time.monotonic()
        start, earlier = self._resume(stage, optimiser, generator)
        if self.metrics is not None:
            self.metrics.rewind(stage.name, start)
        saved = began
        device = parameters[0].device
        largest = torch.zeros((), device=device)
        before = before or {}
        for step in self._steps(stage.name, start):
            if step in before:
                before[step]()
            factor = learning_rate_factor(step, self.config)
            for group in optimiser.param_groups:
                group["lr"] = self.config.learning_rate * factor
            step_began = time.monotonic()
            values: dict[str, torch.Tensor] = {}
            losses = stage.losses(generator, step / self.config.steps)
            while (found := self._next(losses, device)) is not None:
                loss, named = found
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)
                # NaN and infinity stay in it, so that a gradient between two looks is not forgotten.
                largest = torch.maximum(largest, norm)
                if device.type == "cpu":
                    self._require_finite(stage.name, step, loss.detach(), largest)
                optimiser.step()
                values = {"loss": loss.detach(), **named, "gradient_norm": norm}
            stage.after_step()
            last = step + 1 == self.config.steps
            logged = step % self.config.log_every == 0 or last
            saving = last or time.monotonic() - saved > self.config.checkpoint_seconds
            if logged or saving:
                self._require_finite(stage.name, step, values["loss"], largest)
            if logged:
                self._log(stage.name, step, values, self.config.learning_rate * factor, time.monotonic() - step_began)
            if saving:
                saved = time.monotonic()
                self._save(stage, optimiser, generator, step + 1, earlier + saved - began)
        return earlier

    def _steps(self, name: str, start: int) -> Iterator[int]:
        steps = range(start, self.config.steps)
        if not self.progress:
            yield from steps
            return
        from tqdm import tqdm

        yield from tqdm(steps, desc=name, initial=start, total=self.config.steps, leave=False)

    def _log(self, name: str, step: int, values: dict[str, torch.Tensor], rate: float, seconds: float) -> None:
        numbers = {key: float(value) for key, value in values.items()}
        if self.metrics is not None:
            self.metrics.append(name, step, {**numbers, "learning_rate": rate, "step_seconds": round(seconds, 4)})

    def _next(
        self, losses: Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]], device: torch.device
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The next loss of a step, or None after the last one.

        Only this runs under autocast, and leaving it drops the copies in bfloat16 that it keeps of the weights: the
        loss after an optimiser step is one of the new weights.
        """
        with self._autocast(device):
            return next(losses, None)

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.config.amp and device.type == "cuda")

    @staticmethod
    def _require_finite(name: str, step: int, loss: torch.Tensor, largest_norm: torch.Tensor) -> None:
        for what, value in (("loss", float(loss)), ("gradient norm", float(largest_norm))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"{name}, step {step}: {what} is {value}; lower learning_rate, or look for extremes in the log"
                )

    def _path(self, stage: Stage) -> Path | None:
        return None if self.folder is None else self.folder / f"{stage.name}.checkpoint"

    def _save(
        self, stage: Stage, optimiser: torch.optim.Optimizer, generator: torch.Generator, step: int, seconds: float
    ) -> None:
        path = self._path(stage)
        if path is None:
            return
        buffer = io.BytesIO()
        torch.save(
            {
                "config": repr(self.config),
                "seed": self.seed,
                "step": step,
                "seconds": seconds,
                "module": stage.module.state_dict(),
                "optimiser": optimiser.state_dict(),
                "generator": generator.get_state(),
                "global_generator": torch.get_rng_state(),
            },
            buffer,
        )
        write_atomically(path, buffer.getvalue())

    def _resume(self, stage: Stage, optimiser: torch.optim.Optimizer, generator: torch.Generator) -> tuple[int, float]:
        """Return the step to go on from, and the seconds that were spent up to there."""
        path = self._path(stage)
        if path is None or not path.is_file():
            torch.manual_seed(self.seed)
            return 0, 0.0
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ConfigurationError(f"{path}: broken; delete it, and the stage starts again") from error
        if not isinstance(state, dict) or not {"config", "seed", "module", "optimiser"} <= state.keys():
            raise ConfigurationError(f"{path}: not a checkpoint; delete it, and the stage starts again")
        if state["config"] != repr(self.config) or state["seed"] != self.seed:
            raise ConfigurationError(
                f"{path}: written by other settings ({state['config']}, seed {state['seed']}); delete it or choose "
                f"another folder"
            )
        try:
            stage.module.load_state_dict(state["module"])
            optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"{path}: written by another version of the package, or for other settings; delete it or choose "
                f"another folder"
            ) from error
        generator.set_state(state["generator"])
        torch.set_rng_state(state["global_generator"])
        return state["step"], state.get("seconds", 0.0)
