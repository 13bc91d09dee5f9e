"""What the folder of a run holds beside weights: settings, sources, results as JSON, and which stages have ended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from goal.config import RunConfig
from goal.errors import ConfigurationError
from goal.files import fingerprint, write_atomically
from goal.log.sources import find_files
from goal.serialization import dumps, read_json
from goal.simulator import PRESETS

POLICY_SCHEMA = "schema.toml"
"""In the folder of the policy: the schema of the log that it learned from."""
CALIBRATION_FIELDS = {
    "multiplier": float, "feasible": bool, "message": str, "roi_kind": str, "roi_target": float, "intervals": dict,
    "evaluations": list, "confidence": float | None,
}  # fmt: skip
STAGES = ("vocabulary", "pretraining", "reward", "scpo", "calibration", "evaluation", "report")


class RunFolder:
    """One run in one folder.

    Args:
        config: the settings. Where the folder holds a run already, they must be the same.
        folder: created if absent.

    Raises:
        ConfigurationError: the folder holds a run with other settings, or whose environment, log or schema has changed
            since; the message names the first that differs.
    """

    def __init__(self, config: RunConfig, folder: str | Path) -> None:
        self.config = config
        self.folder = Path(folder)
        self._claim()

    def _claim(self) -> None:
        self._claim_sources()
        path = self.folder / "config.json"
        if path.is_file():
            there = _leaves(read_json(path, remedy="mend it, or choose another --out"))
            here = _leaves(json.loads(dumps(self.config)))
            changed = [name for name, value in here.items() if there.get(name) != value]
            if not changed:
                return
            refused = [name for name in changed if not name.startswith("evaluation.")]
            if refused and self.seconds:
                name = refused[0]
                raise ConfigurationError(
                    f"{self.folder} holds a run with {name}={there.get(name)!r}, this one has {here[name]!r}; "
                    f"choose another --out or the same settings"
                )
            if refused:
                self._discard_training()
            self.forget("evaluation")
        write_atomically(path, (dumps(self.config) + "\n").encode())

    def _claim_sources(self) -> None:
        """Refuse to go on with a run whose environment, log or schema has changed; one that is gone is not missed yet.

        They are known by their absolute paths, so that other sources are other settings and not changed ones.
        """
        given = [self.config.log, self.config.schema]
        if self.config.log is None and self.config.environment not in PRESETS:
            given.append(self.config.environment)
        paths = [path for path in (Path(source).absolute() for source in given if source is not None) if path.exists()]
        here = {str(path): fingerprint(_files_of(path)) for path in paths}
        there = self.read("sources.json") if (self.folder / "sources.json").is_file() else {}
        changed = [path for path, found in here.items() if there.get(path, found) != found]
        if changed and self.seconds:
            raise ConfigurationError(
                f"{changed[0]} has changed since the run in {self.folder} began; choose another --out, or put the "
                f"former file back"
            )
        if changed:
            self._discard_training()
        if here.items() - there.items():
            self.write("sources.json", {**there, **here})

    def _discard_training(self) -> None:
        """Remove what training under other settings or on another log left before any stage ended."""
        for path in (*(self.folder / "checkpoints").glob("*.checkpoint"), self.folder / "metrics.jsonl"):
            if path.is_file():
                path.unlink()

    def forget(self, name: str) -> None:
        """Let the result of a stage and of those after it count no more."""
        if self.seconds:
            earlier = STAGES[: STAGES.index(name)]
            self.write("stages.json", {stage: took for stage, took in self.seconds.items() if stage in earlier})

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage that has ended."""
        return self.read("stages.json") if (self.folder / "stages.json").is_file() else {}

    def read(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return a JSON file of the folder.

        Raises:
            ConfigurationError: it is absent or broken, or one of the ``fields`` is missing or of another type.
        """
        # Without stages.json no stage counts as ended, so each writes its files again.
        remedy = f"delete {self.folder / 'stages.json'} and start the run again with the same settings"
        return read_json(self.folder / name, remedy=remedy, fields=fields)

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file of the folder."""
        write_atomically(self.folder / name, (json.dumps(content, indent=2) + "\n").encode())

    def need(self, stage: str) -> None:
        """Raise ConfigurationError unless a stage has ended."""
        if stage not in self.seconds:
            raise ConfigurationError(f"{self.folder}: the stage {stage!r} has not ended there; run it first")


def read_calibration(folder: Path, *, otherwise: str = "") -> dict[str, Any]:
    """Return what `Calibration.to_dict` said of a run's calibration.

    Args:
        folder: of the run.
        otherwise: what else may be done without it, for the message.

    Raises:
        ConfigurationError: the run is not calibrated, or its calibration.json is broken.
    """
    path, remedy = folder / "calibration.json", f"calibrate the run with `goal calibrate --out {folder}`{otherwise}"
    found = read_json(path, remedy=remedy, fields=CALIBRATION_FIELDS)
    if not 0 <= found["multiplier"] < math.inf:
        raise ConfigurationError(f"{path}: multiplier={found['multiplier']}; expected at least 0 and finite; {remedy}")
    return {**found, "multiplier": float(found["multiplier"])}


def _files_of(source: Path) -> list[Path]:
    """A file itself; of a folder the log's files alone, since the run may lie in it."""
    return [source] if source.is_file() else [file.path for file in find_files(source)]


def _leaves(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, each under its dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves
