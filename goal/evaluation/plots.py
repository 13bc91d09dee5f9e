"""The report's plots: each function takes plain data and returns a matplotlib figure.

The keys of the data are those of `goal.evaluation.report.build`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from goal.evaluation.canvas import (
    BEHAVIOUR,
    INK,
    MUTED,
    ORACLE,
    POLICY,
    REFERENCE,
    SURFACE,
    TARGET,
    TEXT_SIZE,
    WIDE,
    end_label,
    heat_map,
    legend,
    new_figure,
    padded,
)
from goal.training.metrics import family

MULTIPLIER_LABEL = "multiplier λ"
# A curve of more points is averaged in blocks of steps: it looks the same and the page stays small.
MOST_POINTS = 120
MOST_PANELS = 12
PALEST = 0.15


def over_multiplier(
    sweep: Sequence[Mapping[str, Any]], name: str, label: str, *, chosen: float | None, error: str | None = None
) -> Figure:
    """One column of the sweep over the multiplier, with a band of two standard errors where there are any."""
    figure, (axis,) = new_figure()
    x, y = _column(sweep, "multiplier"), _column(sweep, name)
    if error is not None:
        band = 2 * _column(sweep, error)
        known = np.isfinite(band)
        axis.fill_between(x[known], (y - band)[known], (y + band)[known], color=POLICY, alpha=0.15, lw=0)
    _line(axis, x, y)
    _mark_chosen(axis, x, y, chosen)
    axis.set(xlabel=MULTIPLIER_LABEL, ylabel=label, ylim=padded(y.tolist(), floor=0.0))
    return figure


def roi_against_target(
    sweep: Sequence[Mapping[str, Any]],
    target: float,
    *,
    chosen: float | None,
    calibration: Mapping[str, Any] | None,
    kind: str = "average",
) -> Figure:
    """The ROI that the target speaks of over the multiplier; calibration's prediction intervals as a band."""
    figure, (axis,) = new_figure()
    x, y = _column(sweep, "multiplier"), _column(sweep, "roi" if kind == "average" else "incremental_roi")
    shown = [value for value in y.tolist() if math.isfinite(value)] + [target]
    if calibration:
        bounds = [(e["multiplier"], *(e["intervals"]["roi"])) for e in calibration["evaluations"]]
        bounds = [bound for bound in bounds if None not in bound and np.nanmin(x) <= bound[0] <= np.nanmax(x)]
        if bounds:
            at, low, high = np.array(bounds, dtype=float).T
            axis.fill_between(at, low, high, color=POLICY, alpha=0.14, lw=0, label="calibration interval")
    axis.axhline(target, color=TARGET, lw=1.2, ls=(0, (4, 3)))
    _line(axis, x, y, label="test users")
    _mark_chosen(axis, x, y, chosen)
    if max(shown) > 20 * max(min(shown), 1e-9) and min(shown) > 0:
        axis.set_yscale("log")
    else:
        axis.set_ylim(*padded(shown, floor=0.0 if min(shown) >= 0 else None))
    # Where nothing is paid there is no ROI to draw, and the axis would not know its multipliers.
    axis.set(
        xlabel=MULTIPLIER_LABEL,
        ylabel="ROI" if kind == "average" else "incremental ROI",
        xlim=padded(x.tolist(), share=0.03),
    )
    end_label(axis, float(np.nanmax(x)), target, f"target {target:g}", TARGET, offset=(0, -4), align="right")
    return figure


def frontier(
    sweep: Sequence[Mapping[str, Any]],
    points: Mapping[str, Any],
    target: float,
    *,
    chosen: float | None,
    currency: str,
) -> Figure:
    """Revenue against cost: the policy's curve, the oracle's, and the behaviour policies of the log."""
    figure, (axis,) = new_figure(WIDE, 4.6)
    cost, rev = _column(sweep, "cost"), _column(sweep, "rev")
    all_costs, all_revs = cost.tolist(), rev.tolist()
    for rows in points.values():
        all_costs += [row["cost"] for row in rows or ()]
        all_revs += [row["rev"] for row in rows or ()]
    right, top = padded(all_costs, floor=0.0)[1], padded(all_revs, floor=0.0, share=0.1)[1]
    reach = np.array([0.0, right])
    axis.fill_between(reach, 0, target * reach, color=TARGET, alpha=0.05, lw=0)
    axis.plot(reach, target * reach, color=TARGET, lw=1.1, ls=(0, (4, 3)))
    if points.get("oracle"):
        best = sorted(points["oracle"], key=lambda row: row["cost"])
        axis.plot(_column(best, "cost"), _column(best, "rev"), color=ORACLE, lw=1.4, ls=(0, (2, 1.5)), label="oracle")
    _line(axis, cost, rev, label="policy")
    for row in points.get("constants") or ():
        axis.plot(row["cost"], row["rev"], marker="D", ms=4, color=REFERENCE, ls="none")
        end_label(axis, row["cost"], row["rev"], f"always {row['amount']:g}", REFERENCE)
    for row in points.get("behaviour") or ():
        axis.plot(row["cost"], row["rev"], marker="s", ms=5, color=BEHAVIOUR, ls="none")
        left = row["cost"] > 0.75 * right
        end_label(axis, row["cost"], row["rev"], row["name"], BEHAVIOUR, offset=(-7 if left else 7, 0))
    for index in _apart(cost / right, rev / top):
        end_label(axis, cost[index], rev[index], f"λ {sweep[index]['multiplier']:g}", MUTED, offset=(4, -7))
    _mark_chosen(axis, cost, rev, chosen, along=_column(sweep, "multiplier"))
    axis.set(xlim=(0, right), ylim=(0, top), xlabel=f"cost per interaction ({currency})")
    axis.set_ylabel(f"revenue per interaction ({currency})")
    # At the far end of the target's line: the chosen multiplier and its label lie near its middle.
    x = 0.95 * min(right, top / target)
    axis.text(x + 0.012 * right, target * x, f"ROI {target:g}", color=TARGET, fontsize=TEXT_SIZE, va="center")
    legend(axis, loc="lower right")
    return figure


def value(sweep: Sequence[Mapping[str, Any]], *, chosen: float | None, currency: str) -> Figure:
    """Value by multiplier beside the oracle's and the best constant amount's, where they are known."""
    figure, (axis,) = new_figure(WIDE, 3.6)
    x, y = _column(sweep, "multiplier"), _column(sweep, "value")
    shown = y.tolist()
    for name, label, color, dashes in (
        ("oracle_value", "oracle", ORACLE, (0, (2, 1.5))),
        ("reference_value", "best constant amount", REFERENCE, (0, (5, 2))),
    ):
        other = _column(sweep, name)
        if np.isfinite(other).any():
            axis.plot(x, other, color=color, lw=1.5, ls=dashes, label=label)
            shown += other.tolist()
    _line(axis, x, y, label="policy")
    _mark_chosen(axis, x, y, chosen)
    axis.set(xlabel=MULTIPLIER_LABEL, ylabel=f"revenue − λ · cost ({currency})", ylim=padded(shown, floor=0.0))
    legend(axis, loc="upper right")
    return figure


def amounts(data: Mapping[str, Any], incentive_unit: str) -> Figure:
    """How often each amount is paid (rows) at each multiplier (columns), in per cent."""
    labels = [label if isinstance(label, str) else f"{label:g}" for label in data["amounts"]]
    share = np.asarray(data["share"], dtype=float).T
    figure, (axis,) = new_figure(WIDE, 0.75 + 0.26 * len(labels))
    heat_map(axis, share.tolist(), [f"{x:g}" for x in data["multipliers"]], labels, numbers=share.shape[1] <= 16)
    axis.set(xlabel=MULTIPLIER_LABEL, ylabel=f"amount ({incentive_unit})")
    return figure


def experts(data: Mapping[str, Any]) -> Figure:
    """Average use of each expert (rows) at each multiplier (columns), in per cent."""
    usage = np.asarray(data["usage"], dtype=float).T
    figure, (axis,) = new_figure(WIDE, 0.75 + 0.32 * usage.shape[0])
    names = [f"expert {index}" for index in range(usage.shape[0])]
    # Expert 0 on top, as in a table.
    heat_map(
        axis, usage[::-1].tolist(), [f"{x:g}" for x in data["multipliers"]], names[::-1], numbers=usage.shape[1] <= 16
    )
    axis.set(xlabel=MULTIPLIER_LABEL)
    return figure


def training(lines: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]]) -> Figure:
    """Small multiples of one stage's metrics over its steps; `panels` is of `metric_panels`, or a part of it.

    Curves of one panel go from pale, the first, to full colour.
    """
    columns = 4
    rows = math.ceil(len(panels) / columns)
    figure, axes = new_figure(WIDE, 1.85 * rows, rows=rows, columns=columns)
    for axis, (name, curves) in zip(axes, panels.items(), strict=False):
        for place, curve in enumerate(curves):
            shade = PALEST + (1 - PALEST) * (place / (len(curves) - 1) if len(curves) > 1 else 1)
            axis.plot(*_series(lines, curve), color=POLICY, alpha=shade, lw=1.3, solid_joinstyle="round")
        axis.set_title(name.replace("_", " "), loc="left", color=INK, fontsize=TEXT_SIZE)
        axis.locator_params(nbins=4)
        axis.margins(x=0.02)
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def vocabulary(tokenizer: Mapping[str, Any], incentive_unit: str) -> Figure:
    """Token values from large to small, and how many tokens an amount takes."""
    figure, (left, right) = new_figure(WIDE, 2.8, columns=2)
    values = np.asarray(tokenizer["values"], dtype=float)
    left.plot(np.arange(1, values.size + 1), values, color=POLICY, lw=1.2, marker="o", ms=2.5, mew=0)
    if values.size > 1 and values.min() > 0 and values.max() > 20 * values.min():
        left.set_yscale("log")
    left.set(xlabel="token, from large to small", ylabel=f"value ({incentive_unit})")
    lengths = np.asarray(tokenizer["lengths"], dtype=float)
    right.bar(np.arange(lengths.size), 100 * lengths, color=POLICY, width=0.72, alpha=0.85, lw=0)
    right.set(xlabel="tokens in an amount", ylabel="amounts (%)")
    right.locator_params(axis="x", integer=True)
    return figure


def logged_roi(windows: Mapping[str, Any]) -> Figure:
    """ROI of the logged policy by window in time order, beside the target."""
    figure, (axis,) = new_figure(WIDE, 2.8)
    roi = np.asarray([math.nan if value is None else value for value in windows["window_roi"]], dtype=float)
    roi[~np.isfinite(roi)] = np.nan
    target = float(windows["target"])
    steps, values = _thin(np.arange(roi.size, dtype=float), roi)
    axis.axhline(target, color=TARGET, lw=1.2, ls=(0, (4, 3)))
    axis.plot(steps, values, color=BEHAVIOUR, lw=1.2)
    axis.fill_between(steps, values, target, where=values < target, color=TARGET, alpha=0.14, lw=0, interpolate=True)
    axis.set(xlabel="window, in time order", ylabel="ROI", ylim=padded([*values.tolist(), target], floor=0.0))
    axis.margins(x=0.01)
    end_label(axis, float(steps[-1]), target, f"target {target:g}", TARGET, offset=(0, -4), align="right")
    return figure


def reward_calibration(items: Sequence[Mapping[str, Any]]) -> Figure:
    """Predicted against observed mean by bin of the prediction, one panel an objective; on the diagonal is right."""
    columns = 4
    rows = math.ceil(len(items) / columns)
    figure, axes = new_figure(WIDE, 2.5 * rows, rows=rows, columns=columns)
    for axis, item in zip(axes, items, strict=False):
        predicted, observed = (np.asarray(item[name], dtype=float) for name in ("predicted", "observed"))
        low, high = padded([*predicted.tolist(), *observed.tolist()])
        axis.plot([low, high], [low, high], color=MUTED, lw=0.9, ls=(0, (2, 2)))
        axis.plot(predicted, observed, color=POLICY, lw=1.2, marker="o", ms=4, mec=SURFACE, mew=0.8)
        axis.set(xlim=(low, high), ylim=(low, high), xlabel="predicted", ylabel="observed")
        axis.set_title(str(item["objective"]).replace("_", " "), loc="left", color=INK, fontsize=TEXT_SIZE)
        axis.locator_params(nbins=4)
    for axis in axes[len(items) :]:
        axis.remove()
    return figure


def promises(rows: Sequence[Mapping[str, Any]], currency: str, *, steps: str) -> Figure:
    """Value promised to new users and value brought, over what `steps` counts, one panel a multiplier."""
    multipliers = list(dict.fromkeys(row["multiplier"] for row in rows))
    columns = min(3, len(multipliers))
    count = math.ceil(len(multipliers) / columns)
    figure, axes = new_figure(WIDE, 2.5 * count, rows=count, columns=columns)
    for axis, multiplier in zip(axes, multipliers, strict=False):
        of_one = [row for row in rows if row["multiplier"] == multiplier]
        place = _column(of_one, "step")
        expected, realised = _column(of_one, "expected_value"), _column(of_one, "realised_value")
        axis.plot(place, realised, color=ORACLE, lw=1.5, ls=(0, (2, 1.5)), label="brought")
        axis.plot(place, expected, color=POLICY, lw=1.5, marker="o", ms=4, mec=SURFACE, mew=0.8, label="promised")
        axis.set_title(f"λ {multiplier:g}", loc="left", color=INK, fontsize=TEXT_SIZE)
        axis.set(xlabel=steps, ylim=padded([*expected.tolist(), *realised.tolist()]))
        axis.locator_params(nbins=4)
    axes[0].set_ylabel(f"value of an episode ({currency})")
    legend(axes[0], loc="lower right")
    for axis in axes[len(multipliers) :]:
        axis.remove()
    return figure


def metric_panels(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Metrics of one stage that make a curve, numbers at two steps or more, by `family` in order of appearance."""
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for line in lines for name in line if name not in ("stage", "step")):
        if _series(lines, name)[0].size > 1:
            panels.setdefault(family(name), []).append(name)
    return panels


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], dtype=float)


def _apart(x: np.ndarray, y: np.ndarray, *, distance: float = 0.045) -> list[int]:
    """Indices of points, both ends first, that are far enough from each other for labels not to overlap."""
    kept: list[int] = []
    for index in dict.fromkeys((0, x.size - 1, *range(x.size))):
        if all(math.hypot(x[index] - x[other], y[index] - y[other]) >= distance for other in kept):
            kept.append(index)
    return kept


def _line(axis: Axes, x: np.ndarray, y: np.ndarray, *, label: str | None = None) -> None:
    axis.plot(
        x, y, color=POLICY, lw=1.8, marker="o", ms=4.5, mec=SURFACE, mew=0.9, label=label, zorder=3, clip_on=False
    )


def _mark_chosen(
    axis: Axes, x: np.ndarray, y: np.ndarray, chosen: float | None, *, along: np.ndarray | None = None
) -> None:
    """A ring where the chosen multiplier lies on the curve, between its neighbours if it is not one of the points."""
    along = x if along is None else along
    order = np.argsort(along)
    finite = order[np.isfinite(y[order]) & np.isfinite(x[order])]
    if chosen is None or not finite.size or not along[finite[0]] <= chosen <= along[finite[-1]]:
        return
    at = np.interp(chosen, along[finite], x[finite]), np.interp(chosen, along[finite], y[finite])
    axis.plot(*at, marker="o", ms=10, mfc="none", mec=INK, mew=1.3, zorder=4, ls="none")


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [
        (line.get("step", index), line[name])
        for index, line in enumerate(lines)
        if isinstance(line.get(name), (int, float, np.number)) and not isinstance(line.get(name), bool)
    ]
    pairs = [(step, number) for step, number in pairs if math.isfinite(number)]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return _thin(steps, values)


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if steps.size <= MOST_POINTS:
        return steps, values
    starts = np.linspace(0, steps.size, MOST_POINTS, endpoint=False).astype(int)
    sizes = np.diff(np.append(starts, steps.size))
    return np.add.reduceat(steps, starts) / sizes, np.add.reduceat(values, starts) / sizes
