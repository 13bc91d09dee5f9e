"""One policy over a range of multipliers, beside what any policy could reach (RQ2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from goal.errors import ConfigurationError
from goal.evaluation import metrics
from goal.evaluation.policies import Allocator, Constant, PrivilegedPolicy
from goal.evaluation.rollout import Rollout, rollout, rollout_many
from goal.simulator import Parameters, simulate
from goal.simulator.behaviour import BEHAVIOURS
from goal.simulator.oracle import best_constant, solve_users

Row = dict[str, float | None]
DEFAULT_RVR_WINDOW = 1000


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a policy did at each multiplier.

    Attributes:
        rows: One a multiplier, plain numbers for JSON, in money per interaction: `multiplier, rev, cost, roi, rvr,
            value = rev - multiplier * cost, oracle_value, reference_value` (the best constant amount), and beside
            them `share_of_gain, regret, incremental_roi, rev_error, cost_error` (standard errors over users). `None`
            where a number does not exist: the ROI of paying nothing, or the oracle where none was asked for.
        rollouts: The rollouts that the rows summarise.
        never_pay_rev: Revenue per interaction of the same users when nobody is ever paid.
        window: Interactions per window of the violation rate.
        stride: Interactions between the starts of neighbouring windows.
    """

    rows: tuple[Row, ...]
    rollouts: tuple[Rollout, ...]
    never_pay_rev: float
    window: int
    stride: int


def sweep(
    policy: Allocator | PrivilegedPolicy,
    parameters: Parameters,
    multipliers: Sequence[float],
    *,
    users: int,
    seed: int,
    roi_target: float,
    window: int = DEFAULT_RVR_WINDOW,
    stride: int | None = None,
    oracle: bool = True,
) -> Sweep:
    """Rolls a policy out at each multiplier, the same users and luck for each, and measures it.

    Args:
        policy: See `goal.evaluation.policies.Allocator`.
        parameters: The environment.
        multipliers: The multipliers, in the order of the rows.
        users: How many users.
        seed: Of the users and their luck.
        roi_target: The ROI whose violations are counted.
        window: Interactions per window of the violation rate.
        stride: Interactions between the starts of windows; a quarter of the window by default.
        oracle: Whether to solve for the exact optimum and the best constant of the same users. Where users differ it
            takes about 10 ms a user and multiplier.

    Raises:
        ConfigurationError: As `rollout_many` and `metrics.roi_violation_rate`.
    """
    if users * parameters.horizon < window:
        raise ConfigurationError(
            f"window is {window}: {users} users make {users * parameters.horizon} interactions, so take a smaller one"
        )
    rollouts = rollout_many(policy, parameters, multipliers, users=users, seed=seed)
    common = {"seed": seed, "roi_target": roi_target, "window": window, "stride": stride}
    return _measure(rollouts, parameters, **common, solved=users if oracle else None)


def of_first_users(
    swept: Sweep, parameters: Parameters, users: int, *, seed: int, roi_target: float, window: int
) -> Sweep:
    """What `sweep` gives for fewer users, the first of the same seed, without rolling out or solving again.

    Args:
        swept: of at least as many users.
        parameters: its environment.
        users: how many to keep.
        seed: as of `swept`.
        roi_target: as of `sweep`.
        window: interactions per window of the violation rate.
    """
    solved, rollouts = len(swept.rollouts[0].revenue), tuple(made.first(users) for made in swept.rollouts)
    return _measure(rollouts, parameters, seed=seed, roi_target=roi_target, window=window, stride=None, solved=solved)


def _measure(
    rollouts: tuple[Rollout, ...],
    parameters: Parameters,
    *,
    seed: int,
    roi_target: float,
    window: int,
    stride: int | None,
    solved: int | None,
) -> Sweep:
    """Measure rollouts; the oracle is solved for ``solved`` users, of whom theirs are the first, or not at all."""
    users, stride = len(rollouts[0].revenue), max(window // 4, 1) if stride is None else stride
    never_pay = rollout(Constant(0.0), parameters, 0.0, users=users, seed=seed).revenue
    rows = []
    for made in rollouts:
        bounds = None if solved is None else _bounds(parameters, made.multiplier, users=users, solved=solved, seed=seed)
        rows.append(_row(made, never_pay, bounds, roi_target=roi_target, window=window, stride=stride))
    return Sweep(tuple(rows), rollouts, metrics.rev(never_pay), window, stride)


def oracle_frontier(
    parameters: Parameters, multipliers: Sequence[float], *, users: int, seed: int
) -> list[dict[str, float]]:
    """Exact revenue and cost per interaction of the oracle at each multiplier, `{"multiplier", "rev", "cost"}` each.

    Args:
        parameters: The environment.
        multipliers: The multipliers.
        users: The users to average over, those of a rollout with the same seed.
        seed: Of the users.

    Raises:
        ConfigurationError: users or seed cannot work.
    """
    solved = [(x, solve_users(parameters, x, users=users, seed=seed)) for x in multipliers]
    return [{"multiplier": float(x), "rev": best.revenue, "cost": best.cost} for x, best in solved]


def behaviour_points(parameters: Parameters, *, users: int, seed: int) -> list[dict[str, Any]]:
    """Revenue and cost per interaction of each behaviour policy that logs come from, `{"name", "rev", "cost"}` each.

    Args:
        parameters: The environment.
        users: How many users each is rolled out on.
        seed: Of the users, their luck and what they are paid.

    Raises:
        ConfigurationError: users or seed cannot work.
    """
    points = []
    for name in BEHAVIOURS:
        log = simulate(parameters, name, users=users, seed=seed)
        points.append(
            {"name": name.replace("_", " "), "rev": float(log.revenue.mean()), "cost": float(log.cost.mean())}
        )
    return points


def constant_points(parameters: Parameters, *, users: int, seed: int) -> list[dict[str, float]]:
    """Revenue and cost per interaction of paying one amount always, `{"amount", "rev", "cost"}` each, from 0 up.

    Args:
        parameters: The environment; of more than 12 levels every so many are taken, the largest included.
        users: How many users each is rolled out on.
        seed: Of the users and their luck.

    Raises:
        ConfigurationError: users or seed cannot work.
    """
    levels = parameters.levels[np.unique(np.linspace(0, len(parameters.levels) - 1, 12).round().astype(int))]
    points = []
    for amount in levels.tolist():
        made = rollout(Constant(amount), parameters, 0.0, users=users, seed=seed)
        points.append({"amount": amount, "rev": metrics.rev(made.revenue), "cost": float(made.cost.mean())})
    return points


def amount_distribution(paid: Mapping[float, np.ndarray], levels: ArrayLike, *, bins: int = 12) -> dict[str, Any]:
    """How often each amount was paid at each multiplier.

    Args:
        paid: Amounts by multiplier, of any shape.
        levels: `(n,)`, the amounts that may be paid, ascending from 0.
        bins: Where there are more levels than this, neighbours are joined into that many bins; paying nothing keeps
            a bin of its own.

    Returns:
        `{"multipliers": (n), "amounts": (bins) labels, "share": (n, bins)}`, rows of which sum to 1.

    Raises:
        ConfigurationError: There is no multiplier, or `bins` is below 2.
    """
    if not paid:
        raise ConfigurationError("paid is empty: expected the amounts of at least one multiplier")
    if bins < 2:
        raise ConfigurationError(f"bins is {bins}: expected at least 2, one of them for paying nothing")
    levels = np.asarray(levels, dtype=np.float64)
    positive = np.array_split(levels[1:], min(bins, levels.size) - 1) if levels.size > 1 else []
    groups = [levels[:1], *positive]
    labels = [f"{group[0]:g}" if group.size == 1 else f"{group[0]:g}–{group[-1]:g}" for group in groups]
    lowest = np.array([group[0] for group in groups])
    share = [
        np.bincount(np.searchsorted(lowest, amounts.ravel(), side="right") - 1, minlength=len(groups)) / amounts.size
        for amounts in paid.values()
    ]
    return {
        "multipliers": list(paid),
        "amounts": labels,
        "share": np.stack(share).tolist(),
    }


def _bounds(parameters: Parameters, multiplier: float, *, users: int, solved: int, seed: int) -> tuple[float, float]:
    best = solve_users(parameters, multiplier, users=solved, seed=seed)
    value = metrics.rev(best.user_revenue[:users]) - multiplier * float(best.user_cost[:users].mean())
    return value, best_constant(parameters, multiplier, users=users, seed=seed).value


def _row(
    made: Rollout,
    never_pay: np.ndarray,
    bounds: tuple[float, float] | None,
    *,
    roi_target: float,
    window: int,
    stride: int,
) -> Row:
    stream = made.stream()
    rev, cost = metrics.rev(made.revenue), float(made.cost.mean())
    value = rev - made.multiplier * cost
    oracle, reference = bounds if bounds is not None else (None, None)
    per_user_revenue, per_user_cost = made.per_user()
    row: Row = {
        "multiplier": made.multiplier,
        "rev": rev,
        "cost": cost,
        "roi": metrics.roi(made.revenue, made.cost),
        "rvr": metrics.roi_violation_rate(*stream, target=roi_target, window=window, stride=stride),
        "value": value,
        "oracle_value": oracle,
        "reference_value": reference,
        "share_of_gain": None,
        "regret": None,
        "incremental_roi": metrics.incremental_roi(made.revenue, made.cost, baseline=never_pay),
        "rev_error": _standard_error(per_user_revenue),
        "cost_error": _standard_error(per_user_cost),
    }
    if oracle is not None and reference is not None:
        row["share_of_gain"] = metrics.share_of_gain(value, oracle=oracle, reference=reference)
        row["regret"] = metrics.regret(value, oracle=oracle)
    return {name: number if number is not None and math.isfinite(number) else None for name, number in row.items()}


def _standard_error(per_user: np.ndarray) -> float:
    return float(per_user.std(ddof=1)) / math.sqrt(per_user.size) if per_user.size > 1 else math.nan
