"""The stages of `goal run`, in order. Each leaves its result in the run's folder, and each is also a subcommand.

    vocabulary -> pretraining -> reward -> scpo -> calibration -> evaluation -> report

A stage whose result is there is not run again; a training stage that was killed goes on from its latest checkpoint. So
a run that is started again with the same folder ends with the same result.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from goal import results
from goal.config import LoopConfig, PolicyConfig, RunConfig
from goal.constraint import calibrate, candidates, threshold
from goal.data import Data, Stream, load_data, seed_of
from goal.errors import ConfigurationError
from goal.files import write_atomically
from goal.log import thinned
from goal.model import Policy
from goal.reward import RewardModel
from goal.run_folder import POLICY_SCHEMA, STAGES, RunFolder
from goal.serialization import from_dict, read_json, to_dict
from goal.shapes import build_reward, policy_config
from goal.tokenizer import IncentiveTokenizer
from goal.training import (
    Loop,
    MetricsFile,
    Pretraining,
    PScoreStage,
    Scpo,
    Stage,
    StateSampler,
    Transitions,
    ValueStage,
    plan,
)

THRESHOLD_QUANTILE = 0.99
"""Of Proposition 1's threshold over states; the maximum would hang on the worst estimated state."""
SNAPSHOTS = 5
"""Points of the value's training at which it is kept, to be compared with what it brings."""
MOST_STATES = 4096
"""Training states that the threshold is found on, at most."""
THRESHOLD_CAP = 1.5
"""Candidates beyond the ROI target, which no multiplier that meets it exceeds, go no further than this many times it,
or `LEAST_CAP`: where amounts start small the threshold is many times any target."""
LEAST_CAP = 4.5
MOST_CANDIDATES = 24
"""Where the step would give more candidates, it is doubled until it does not."""


class Run(RunFolder):
    """The stages of one run.

    Args:
        config: the settings.
        folder: see `RunFolder`.
        progress: show progress bars.
        announce: called with a line of text when a stage begins and ends.

    Raises:
        ConfigurationError: the folder holds another run (see `RunFolder`), or there is no such device.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: str | Path,
        *,
        progress: bool = False,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.device = _device(config.device)
        super().__init__(config, folder)
        self.progress = progress
        self.announce = announce or (lambda text: None)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self._earlier_seconds = 0.0
        """Of the present stage, in processes that were killed."""

    @classmethod
    def open(cls, folder: str | Path, *, progress: bool = False, announce: Callable[[str], None] | None = None) -> Run:
        """Open the run that a folder holds.

        Raises:
            ConfigurationError: there is none, or its config.json is broken; the message says where.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigurationError(
                f"{path}: not found; `goal run --out {folder}` or `goal vocabulary` starts a run there"
            )
        remedy = "mend it, or start a run in another folder with `goal run --out`"
        config = from_dict(RunConfig, read_json(path, remedy=remedy), source=path, remedy=remedy)
        return cls(config, folder, progress=progress, announce=announce)

    # ---- what the stages share

    @cached_property
    def data(self) -> Data:
        """The log."""
        return load_data(self.config)

    @cached_property
    def tokenizer(self) -> IncentiveTokenizer:
        """The vocabulary that the first stage fitted."""
        self.need("vocabulary")
        return IncentiveTokenizer.load(self.folder)

    @cached_property
    def policy_config(self) -> PolicyConfig:
        """Shape of the policy: the log decides what the settings leave open."""
        return policy_config(self.config, self.data, self.tokenizer)

    def policy(self, name: str) -> Policy:
        """Load the policy of a stage: "pretrained", or "policy" for the final one."""
        self.need({"pretrained": "pretraining", "policy": "scpo"}[name])
        return Policy.from_pretrained(self.folder / name).to(self.device).eval()

    def _untrained_reward(self, multipliers: tuple[float, ...], *, planned: bool) -> RewardModel:
        return build_reward(self.config, self.data, self.policy_config, multipliers, self.device, planned=planned)

    @cached_property
    def reward(self) -> RewardModel:
        """The reward model that the reward stage trained."""
        self.need("reward")
        reward = self._untrained_reward(self.multipliers, planned=not self._found["uses_history"])
        path = self.folder / "reward" / "model.safetensors"
        try:
            reward.load_state_dict(load_file(path))
        except (RuntimeError, SafetensorError) as error:
            raise ConfigurationError(
                f"{path}: broken, or written by another version of the package; start the run in another folder"
            ) from error
        return reward.requires_grad_(False).eval()

    @property
    def _found(self) -> dict[str, Any]:
        """What the reward stage found beside weights."""
        return self.read("reward/config.json", multipliers=tuple[float, ...], uses_history=bool)

    @property
    def multipliers(self) -> tuple[float, ...]:
        """The candidate set: up to Proposition 1's threshold, as the reward stage found it."""
        return tuple(float(value) for value in self._found["multipliers"])

    # ---- the stages

    def vocabulary(self) -> None:
        """Algorithm 1 on the training amounts."""
        amounts = self.data.log.incentives[self.data.splits.training]
        tokenizer = IncentiveTokenizer.fit(amounts, **to_dict(self.config.vocabulary))
        tokenizer.save(self.folder)
        listed = np.array(self.data.allowed_amounts or ())
        left_out = listed[~tokenizer.writes(listed)]
        if len(left_out):
            self.announce(
                f"  {len(left_out)} of {len(listed)} logged amounts, such as {left_out[0]:g}, cannot be written in "
                f"units of {tokenizer.min_unit:g} and are not offered; a smaller --vocabulary.min-unit or "
                f"more --vocabulary.max-tokens would write them"
            )

    def pretraining(self) -> None:
        """W-NTP on the training rows."""
        torch.manual_seed(self.config.seed)
        policy = Policy(self.policy_config, self.data.scaling).to(self.device)
        windows = self.data.windows(self.data.splits.training, self.policy_config.window)
        multipliers = candidates(self.config.roi_target, step=self.config.constraint.step)
        stage = Pretraining(policy, windows, self.tokenizer, self.config.pretraining, multipliers)
        self._train(stage, self.config.pretraining.loop, Stream.PRETRAINING)
        policy.save_pretrained(self.folder / "pretrained")

    def reward_stage(self) -> None:
        """P-Score, candidate set, long-horizon value."""
        data, config = self.data, self.config.reward
        rows = data.splits.training
        reward = self._untrained_reward((0.0,), planned=False)
        stage = PScoreStage(reward.pscore, data.log, rows, config)
        self._train(stage, config.pscore, Stream.PSCORE)
        evidence = stage.finish()
        if config.history == "always":
            reward.pscore.state.uses_history.fill_(True)
        why = f"evidence of {evidence:.1f} standard errors on kept-back users"
        why = "too few users to tell" if math.isnan(evidence) else why
        why = "as told" if config.history == "always" else why
        used = "used" if reward.pscore.state.uses_history else "left out"
        self.announce(f"  the past of a decision is {used} ({why})")
        weights = reward.pscore.state_dict()
        multipliers = self._candidates(reward)
        reward = self._untrained_reward(multipliers, planned=not reward.pscore.state.uses_history)
        reward.pscore.load_state_dict(weights)
        if reward.planned is not None:
            self.metrics.rewind("value", 0)
            generator = torch.Generator().manual_seed(seed_of(self.config.seed, Stream.VALUE))
            plan(reward, data.log, rows, generator=generator, metrics=self.metrics)
        elif reward.looks_ahead:
            stage = ValueStage(reward, data.log, rows, config, horizon=data.schema.horizon)
            before = {step: partial(self._keep, stage, step) for step in self._snapshot_steps}
            self._train(stage, config.value, Stream.VALUE, before=before)
            stage.finish()
        folder = self.folder / "reward"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_on_cpu(reward.state_dict()), folder / "model.safetensors")
        found = {
            "multipliers": multipliers,
            "uses_history": bool(reward.pscore.state.uses_history),
            "evidence_for_history": evidence if math.isfinite(evidence) else None,
        }
        write_atomically(folder / "config.json", json.dumps(found).encode())

    @property
    def _snapshot_steps(self) -> range:
        """Steps of the value's training before which its weights are kept, where a simulator can tell what they are
        worth."""
        steps = self.config.reward.value.steps
        return range(0, steps if self.data.parameters is not None else 0, math.ceil(steps / SNAPSHOTS))

    def _snapshot(self, step: int) -> Path:
        return self.folder / "reward" / f"value-{step}.safetensors"

    def _keep(self, stage: ValueStage, step: int) -> None:
        self._snapshot(step).parent.mkdir(parents=True, exist_ok=True)
        save_file(_on_cpu(stage.averaged), self._snapshot(step))

    def values_in_the_making(self) -> Iterator[tuple[int, RewardModel]]:
        """The reward model as it was at points of the training of its values, by step, and as it is; for the report.

        Where values are planned, steps count how far they look ahead. A run whose reward model is older than the
        snapshots has the last ones alone.
        """
        then = copy.deepcopy(self.reward)
        if then.planned is not None:
            horizon = then.planned.horizon
            for ahead in range(0, horizon or 0, math.ceil((horizon or 1) / SNAPSHOTS)):
                then.planned.lookahead = ahead
                yield ahead, then
            then.planned.lookahead = None
            yield horizon or 0, then
        elif then.looks_ahead:
            for step in self._snapshot_steps:
                if self._snapshot(step).is_file():
                    then.values.load_state_dict(load_file(self._snapshot(step)))
                    yield step, then
            yield self.config.reward.value.steps, self.reward

    @torch.no_grad()
    def _candidates(self, reward: RewardModel) -> tuple[float, ...]:
        """Candidate multipliers up to Proposition 1's threshold over a sample of training states."""
        rows = self.data.splits.training
        windows = self.data.windows(thinned(rows, MOST_STATES), reward.window)
        history = windows.batch(np.arange(len(windows))).to(self.device)
        revenue, cost = reward.immediate(reward.pscore.state.pending(history))
        # A cost tower need not be monotone; the threshold asks for ascending costs.
        order = cost.mean(dim=0).argsort()
        cost = cost[:, order].double().cummax(dim=1).values
        cost += 1e-6 * cost.max().clamp(min=1e-6) * torch.arange(len(order), device=cost.device)
        limit = threshold(revenue[:, order].cpu().numpy(), cost.cpu().numpy(), quantile=THRESHOLD_QUANTILE)
        target, step = self.config.roi_target, self.config.constraint.step
        limit = min(limit, max(THRESHOLD_CAP * target, LEAST_CAP))
        found = candidates(target, step=step, threshold=limit)
        while len(found) > MOST_CANDIDATES:
            step *= 2
            self.announce(
                f"  {len(found)} candidate multipliers are more than {MOST_CANDIDATES}: step {step:g} instead"
            )
            found = candidates(target, step=step, threshold=limit)
        return found

    def scpo(self) -> None:
        """Policy optimisation under the reward model."""
        policy, loop = self.policy("pretrained"), self.config.scpo.loop
        if not self.reward.pscore.state.uses_history:
            policy.config = dataclasses.replace(policy.config, window=1)
            loop = dataclasses.replace(loop, steps=self.config.scpo.repeat * loop.steps)
        windows = self.data.windows(self.data.splits.training, max(policy.config.window, self.reward.window))
        states = StateSampler(windows, clock=self.data.clock, horizon=self.data.schema.horizon, device=self.device)
        transitions = None
        if self.reward.pscore.state.uses_history and self.reward.looks_ahead and self.config.scpo.imagined:
            transitions = Transitions(self.reward, self.data.log, self.data.splits.training)
            self.announce(f"  {self.config.scpo.imagined:.0%} of the states are the policy's own, imagined")
        stage = Scpo(policy, self.reward, states, self.config.scpo, transitions=transitions)
        self._train(stage, loop, Stream.SCPO)
        policy.save_pretrained(self.folder / "policy")
        self.data.schema.save(self.folder / "policy" / POLICY_SCHEMA)

    def calibration(self) -> None:
        """The multiplier that meets the target on users of its own (Algorithm 2)."""
        policy, settings = self.policy("policy"), self.config.constraint
        parameters = self.data.parameters
        if parameters is None:
            evaluate, baseline = results.estimated_per_user(self.reward, policy, self.data)
        else:
            seed = seed_of(self.config.seed, Stream.CALIBRATION)
            evaluate, baseline = results.simulated_per_user(policy, parameters, users=settings.users, seed=seed)
        calibration = calibrate(
            evaluate,
            self.multipliers,
            roi_target=self.config.roi_target,
            roi=settings.roi,
            confidence=settings.confidence,
            baseline=baseline,
            refine=settings.fine_step,
        )
        found = calibration.to_dict()
        if parameters is None:
            found["message"] += " This takes the reward model's word for what the policy's amounts bring."
        self.announce(f"  {found['message']}")
        self.write("calibration.json", found)

    def evaluation(self) -> None:
        """Sweep over the multipliers on fresh users or the test split; artefacts of the report."""
        self.write("evaluation.json", results.evaluate(self, self.policy("policy")))

    def report(self) -> None:
        """summary.json, plots and report.html."""
        results.write_report(self)

    # ---- running them

    def run(self, until: str = STAGES[-1]) -> dict[str, Any]:
        """Run every stage up to ``until`` whose result is not there yet; return the summary, if it has come to that."""
        for name in STAGES[: STAGES.index(until) + 1]:
            self.run_stage(name)
        return self.read("summary.json") if "report" in self.seconds else {}

    def run_stage(self, name: str, *, again: bool = False) -> None:
        """Run one stage unless its result is there; ``again`` runs it anyway, and what came after it counts no more."""
        if again:
            self.forget(name)
        elif name in self.seconds:
            self.announce(f"{name}: its result is there")
            return
        for earlier in STAGES[: STAGES.index(name)]:
            self.need(earlier)
        stages: dict[str, Callable[[], None]] = {
            "vocabulary": self.vocabulary,
            "pretraining": self.pretraining,
            "reward": self.reward_stage,
            "scpo": self.scpo,
            "calibration": self.calibration,
            "evaluation": self.evaluation,
            "report": self.report,
        }
        self.announce(f"{name} ...")
        began, self._earlier_seconds = time.monotonic(), 0.0
        stages[name]()
        seconds = time.monotonic() - began + self._earlier_seconds
        self.write("stages.json", {**self.seconds, name: round(seconds, 3)})
        self.announce(f"{name}: {seconds:.1f} s")

    def _train(
        self,
        stage: Stage,
        config: LoopConfig,
        stream: Stream,
        *,
        before: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        loop = Loop(
            config,
            folder=self.folder / "checkpoints",
            metrics=self.metrics,
            seed=seed_of(self.config.seed, stream),
            progress=self.progress,
        )
        self._earlier_seconds += loop.run(stage, before=before)


def _on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu().contiguous() for name, value in weights.items()}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device={name!r}: expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={name!r}: no CUDA device is available here; take cpu or auto")
    return device
