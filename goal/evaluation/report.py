"""The report: one self-contained HTML file, and its plots as PNG files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from goal.errors import ConfigurationError
from goal.evaluation.blocks import Plot
from goal.evaluation.canvas import save_png, to_svg
from goal.evaluation.sections import sections
from goal.evaluation.tables import show, show_percent, show_whole
from goal.files import write_atomically

REQUIRED = {
    "run": ("source", "seed", "device", "wall_seconds"),
    "headline": ("roi_target", "multiplier", "feasible", "roi", "rev", "cost", "rvr", "window", "stride"),
}
OPTIONAL = (
    "settings",
    "sweep",
    "frontier",
    "calibration",
    "amounts",
    "experts",
    "metrics",
    "metric_help",
    "tokenizer",
    "log",
    "diagnostics",
)


def build(artefacts: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Writes `report.html` and `plots/*.png` into a folder.

    The page needs no network and no other file. It follows the reader's light or dark theme.

    Args:
        artefacts: Plain values; NumPy arrays and scalars are fine. `run` and `headline` are required, any other section
            is left out of the page where its key is missing or `None`. Keys marked ? are optional.

            * `run`: `source` (such as "environment calibrated"), `seed`, `device`, `wall_seconds`, `title`?, `effort`?,
              `created`?, `versions`? (name to version), `currency`?, `incentive_unit`?, `notes`? (sentences)
            * `settings`: nested mapping of names to values; each first level is a table
            * `headline`: `roi_target`, `multiplier`, `feasible`, `roi`, `rev`, `cost`, `rvr`, `window`, `stride`,
              `estimate`? (True where the figures are the reward model's), `roi_kind`? (average or incremental),
              `message`?, `users`?, `confidence`?, `roi_interval`?, `rev_interval`?, `cost_interval`?,
              `incremental_roi_interval`? (pairs), `never_pay_rev`?, `incremental_roi`?, `best_rev`? (most revenue that
              any policy can earn at the target), `share_of_best`?, `oracle_rvr`? (violation rate of the oracle at the
              same average ROI)
            * `sweep`: rows of `goal.evaluation.sweep`
            * `frontier`: `oracle`? rows of `multiplier, rev, cost`; `behaviour`? rows of `name, rev, cost`;
              `constants`? rows of `amount, rev, cost`
            * `calibration`: `Calibration.to_dict()`
            * `amounts`: `amount_distribution(...)`, that is `multipliers` (n), `amounts` (m), `share` (n, m)
            * `experts`: `ExpertUsage.to_dict()`, that is `multipliers` (n), `usage` (n, experts)
            * `metrics`: the lines of metrics.jsonl, mappings with `stage`, `step` and numbers by name;
              `metric_help`: stage to name (see `goal.training.metrics.family`) to sentence, printed under the curves
            * `tokenizer`: `size`, `max_length`, `worst_relative_error`, `values` (token values), `lengths` (share of
              amounts that take 0, 1, ... tokens), `mean_length`?
            * `log`: `events`, `users`, `randomised`, `name`?, `splits`? (name to events), `accuracy`? (rows of
              `predictor` and numbers, columns by the first row), `windows`? (`target, window, stride, roi, rvr,
              window_roi` in time order, of the logged policy),
              `estimate`? (rows of `multiplier, rev, cost, roi`), `notes`?, `off_policy`? (of `log_evidence`)
            * `diagnostics`: `reward_calibration`? rows of `objective, predicted (b), observed (b)`; `ledger`? and
              `promises`? as `goal.evaluation.ledger` makes them, `planned`? (True where values are planned)
        folder: Made where it does not exist.

    Returns:
        The path of `report.html`.

    Raises:
        ConfigurationError: A required key is missing, or a key is unknown.
    """
    _check(artefacts)
    artefacts = {key: _plain(value) for key, value in artefacts.items() if value is not None}
    folder = Path(folder)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    made = sections(artefacts)
    drawings: dict[str, Markup] = {}
    for block in (block for section in made for block in section.blocks):
        if isinstance(block, Plot):
            save_png(block.figure, folder / "plots" / f"{block.name}.png")
            # Made by matplotlib from escaped text.
            drawings[block.name] = Markup(to_svg(block.figure, block.name, block.caption))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        run=artefacts["run"],
        title=artefacts["run"].get("title") or "Incentive policy",
        facts=_run_facts(artefacts["run"]),
        verdict=_verdict(artefacts["headline"]),
        tiles=_tiles(artefacts["headline"], artefacts["run"].get("currency") or "units"),
        estimate=bool(artefacts["headline"].get("estimate")),
        sections=made,
        drawings=drawings,
    )
    path = folder / "report.html"
    write_atomically(path, page.encode())
    return path


@dataclass(frozen=True)
class Verdict:
    """The page's first sentence; `state` is "met", "missed" or "infeasible"."""

    state: str
    label: str
    sentence: str
    detail: str


@dataclass(frozen=True)
class Tile:
    """One headline figure."""

    label: str
    value: str
    detail: str


def _check(artefacts: Mapping[str, Any]) -> None:
    unknown = sorted(set(artefacts) - set(REQUIRED) - set(OPTIONAL))
    if unknown:
        raise ConfigurationError(f"artefacts has unknown keys {unknown}: known are {[*REQUIRED, *OPTIONAL]}")
    for section, keys in REQUIRED.items():
        given = artefacts.get(section)
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"artefacts[{section!r}] is {type(given).__name__}: expected a mapping")
        missing = [key for key in keys if key not in given]
        if missing:
            raise ConfigurationError(f"artefacts[{section!r}] lacks {missing}: give each of {list(keys)}")


def _plain(value: Any) -> Any:
    """NumPy as Python, and numbers that are not finite as None, so that sections meet one kind of missing value."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds = float(run["wall_seconds"])
    took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
    facts = [("source", run["source"]), ("seed", run["seed"]), ("effort", run.get("effort"))]
    facts += [("device", run["device"]), ("took", took), ("made", run.get("created"))]
    return [(name, str(value)) for name, value in facts if value is not None]


def _verdict(headline: Mapping[str, Any]) -> Verdict:
    incremental = headline.get("roi_kind") == "incremental"
    name = "Incremental ROI" if incremental else "ROI"
    target, roi = headline["roi_target"], headline["incremental_roi" if incremental else "roi"]
    multiplier = f"{headline['multiplier']:.4g}"
    where = f"on {show_whole(headline['users'])} users" if headline.get("users") else "on the test traffic"
    where = "by the reward model's estimate" if headline.get("estimate") else where
    # Nothing paid is an infinite ROI, which arrives here as None.
    reached = f"{name} {show(roi, 2)} {where}, target {show(target, 2)}." if roi is not None else "Nothing is paid."
    detail = headline.get("message") or ""
    if not headline["feasible"]:
        sentence = f"No multiplier meets the target. The safest is λ = {multiplier}: {reached}"
        return Verdict("infeasible", "target not feasible", sentence, detail)
    if roi is None or roi >= target:
        return Verdict("met", "target met", f"Serve with λ = {multiplier}. {reached}", detail)
    sentence = f"λ = {multiplier} met the target on the calibration users but misses it here: {reached}"
    return Verdict("missed", "target missed", sentence, detail)


def _tiles(headline: Mapping[str, Any], currency: str) -> list[Tile]:
    oracle = headline.get("oracle_rvr")
    tiles = [
        Tile("ROI", "∞" if headline["roi"] is None else show(headline["roi"], 2), _interval(headline, "roi", 2)),
        Tile("revenue", show(headline["rev"]), _interval(headline, "rev") or f"{currency} per interaction"),
        Tile("cost", show(headline["cost"]), _interval(headline, "cost") or f"{currency} per interaction"),
        Tile(
            "ROI violation rate",
            show_percent(headline["rvr"]),
            f"window {show_whole(headline['window'])}, stride {show_whole(headline['stride'])}"
            + (f"; the oracle's at this ROI {show_percent(oracle)}" if oracle is not None else ""),
        ),
    ]
    if "incremental_roi" in headline:
        detail = _interval(headline, "incremental_roi", 2) or "gain over never paying per unit of cost"
        tiles.append(Tile("incremental ROI", show(headline["incremental_roi"], 2), detail))
    if headline.get("never_pay_rev") is not None:
        tiles.append(Tile("revenue if never paying", show(headline["never_pay_rev"]), f"{currency} per interaction"))
    if headline.get("best_rev") is not None:
        share = headline.get("share_of_best")
        share = headline["rev"] / headline["best_rev"] if share is None and headline["best_rev"] else share
        detail = f"most that meets the target is {show(headline['best_rev'])}"
        tiles.append(Tile("share of best revenue", show_percent(share), detail))
    return tiles


def _interval(headline: Mapping[str, Any], name: str, digits: int | None = None) -> str:
    bounds = headline.get(f"{name}_interval")
    if not bounds or None in bounds:
        return ""
    low, high = (show(bound, digits) for bound in bounds)
    confidence = headline.get("confidence")
    # Each end is one-sided at the confidence, so both together hold with twice the doubt.
    level = f" ({show_percent(2 * confidence - 1, 0)})" if confidence else ""
    return f"predicted {low} to {high}{level}"
