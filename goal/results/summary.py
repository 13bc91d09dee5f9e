"""summary.json, plots and report of a run, from what its stages left."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from goal.evaluation import report
from goal.files import write_atomically
from goal.run_folder import read_calibration
from goal.serialization import to_dict
from goal.training.metrics import explain, family

if TYPE_CHECKING:
    from goal.pipeline import Run


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("goal-incentives", "torch", "numpy", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _metric_help(lines: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Sentences of the metrics that occur, by stage and `family`."""
    found: dict[str, dict[str, str]] = {}
    for stage, name in {(line["stage"], family(name)): None for line in lines for name in line}:
        if (sentence := explain(stage, name)) is not None:
            found.setdefault(stage, {})[name] = sentence
    return found


def write_report(run: Run) -> None:
    """Write summary.json, plots/*.png and report.html from what the earlier stages left."""
    evaluation = run.read("evaluation.json", headline=dict, sweep=list)
    headline = evaluation["headline"]
    wall_seconds = round(sum(run.seconds.values()), 1)
    source = f"log {run.config.log}" if run.config.log else f"environment {run.config.environment or 'calibrated'}"
    fields = ("multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value")
    summary = {
        **{name: headline[name] for name in ("roi_target", "multiplier", "rev", "cost", "roi", "rvr")},
        "feasible": headline["feasible"],
        "estimate": headline.get("estimate", False),
        "oracle_rvr": headline.get("oracle_rvr"),
        **{name: headline[name] for name in ("window", "stride")},
        "sweep": [{name: row[name] for name in fields} for row in evaluation["sweep"]],
        "wall_seconds": wall_seconds,
        "device": str(run.device),
        "versions": versions(),
    }
    schema = run.data.schema
    statistics = run.tokenizer.statistics
    assert statistics is not None  # the vocabulary stage fitted it
    artefacts = {
        "run": {
            "source": source,
            "seed": run.config.seed,
            "effort": run.config.effort,
            "device": str(run.device),
            "wall_seconds": wall_seconds,
            "versions": versions(),
            "currency": schema.currency,
            "incentive_unit": schema.incentive_unit,
        },
        "settings": {**to_dict(run.config), "found_on_the_log": run.read("reward/config.json")},
        "calibration": read_calibration(run.folder),
        "metrics": (lines := run.metrics.read()),
        "metric_help": _metric_help(lines),
        "tokenizer": {
            "size": statistics.size,
            "max_length": statistics.worst_length,
            "mean_length": statistics.mean_length,
            "worst_relative_error": statistics.worst_relative_error,
            "values": run.tokenizer.values.tolist(),
            "lengths": [count / statistics.amounts for count in statistics.length_counts],
        },
        **evaluation,
    }
    report.build(artefacts, run.folder)
    write_atomically(run.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
