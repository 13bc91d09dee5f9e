"""How near the policies of finished runs come to the exact optimum of their environment, on fresh users.

    python benchmarks/optimum.py runs/calibrated runs/population --users 5000

prints for each run: the calibrated multiplier on users that nothing was chosen on; shares of the gain at, between and
beyond the candidates; whether cost falls with the multiplier; how often repeated calibration misses; and, where users
differ, the policy beside the oracle that knows everything and the best plan that ignores history. Revenue counts as
its exact expectation given what was paid, except where it says otherwise.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from goal.constraint import calibrate, without_rises
from goal.data import Stream, seed_of
from goal.evaluation import metrics
from goal.evaluation.rollout import Rollout, expected_revenue, rollout, rollout_many
from goal.evaluation.violations import oracle_violation_rate
from goal.pipeline import Run
from goal.simulator import Parameters, best_plan
from goal.simulator.oracle import best_constant, best_revenue, solve_users

STEP = 0.05
"""Of the multipliers at which cost is looked at, and among which calibration is repeated."""
DRAWS = 200


def shares(run: Run, parameters: Parameters, multipliers: list[float], *, users: int, seed: int) -> None:
    """Print value, share of the oracle's value and share of the gain over the best constant at each multiplier."""
    for made in rollout_many(run.policy("policy"), parameters, multipliers, users=users, seed=seed):
        at, cost = made.multiplier, float(made.cost.mean())
        value = float(expected_revenue(made, parameters, seed=seed).mean()) - at * cost
        came = metrics.rev(made.revenue) - at * cost
        best = solve_users(parameters, at, users=users, seed=seed).value
        constant = best_constant(parameters, at, users=users, seed=seed).value
        gain = f"{metrics.share_of_gain(value, oracle=best, reference=constant):.3f}"
        line = f"  {at:5.2f}  value {value:8.4f} (came in {came:8.4f})  "
        line += f"of the oracle {value / best:.3f}  of the gain {gain}"
        if not parameters.users_alike:
            plan = best_plan(parameters, at, users=users, seed=seed)
            line += f"  best plan {plan.value / best:.3f} ({plan.kind}): {value / plan.value - 1:+.1%}"
        print(line, flush=True)


def calibrated(run: Run, parameters: Parameters, *, users: int, seed: int) -> None:
    """Print what the calibrated multiplier brings fresh users, luck included."""
    target, multiplier = run.config.roi_target, run.read("calibration.json")["multiplier"]
    made = rollout(run.policy("policy"), parameters, multiplier, users=users, seed=seed)
    settings, interactions = run.config.evaluation, users * parameters.horizon
    windows = {"target": target, "window": settings.window(interactions), "stride": settings.stride(interactions)}
    violations = metrics.roi_violation_rate(*made.stream(), **windows)
    roi = metrics.roi(made.revenue, made.cost)
    line = f"  multiplier {multiplier:.3f}: ROI {roi:.4f} (target {target:g}), violation rate {violations:.3f}"
    if parameters.users_alike and math.isfinite(roi):
        best = best_revenue(parameters, target).revenue
        oracle = oracle_violation_rate(parameters, roi, users=users, seed=seed, **windows)
        rate = "none" if oracle is None else f"{oracle:.3f}"
        line += f" (oracle of that ROI {rate}), {made.revenue.mean() / best:.3f} of the best revenue {best:.3f}"
    print(line, flush=True)


def range_of_multipliers(run: Run, parameters: Parameters, *, users: int, seed: int) -> list[Rollout]:
    """Print where cost rises with the multiplier, as it is and by `without_rises`; return the rollouts."""
    grid = np.arange(0, run.config.roi_target + STEP / 2, STEP)
    made = [
        each
        for part in np.array_split(grid, 8)
        for each in rollout_many(run.policy("policy"), parameters, part.tolist(), users=users, seed=seed)
    ]
    cost = np.stack([each.per_user()[1] for each in made])
    print(f"  cost at {len(grid)} multipliers of {users} users rises after: {_rises(grid, cost)}", flush=True)
    decided, others = np.array_split(cost, 2, axis=1)
    served = np.searchsorted(grid, without_rises(grid, decided.mean(axis=1)))
    print(f"  served without rises, by half of them, that of the others: {_rises(grid, others[served])}", flush=True)
    return made


def _rises(grid: np.ndarray, cost: np.ndarray) -> str:
    """Where the mean of cost `(multipliers, users)` rises, by how much, and the error of that."""
    change = np.diff(cost, axis=0)
    error = change.std(axis=1, ddof=1) / cost.shape[1] ** 0.5
    rises = [f"{grid[i]:.2f} ({change[i].mean():+.4f} ± {error[i]:.4f})" for i in np.flatnonzero(change.mean(1) > 0)]
    return ", ".join(rises) or "none"


def repeated_calibration(run: Run, parameters: Parameters, made: list[Rollout], *, new_users: int = 500) -> None:
    """Calibrate the average ROI on some users of rollouts and look at others of them, many times; print misses and
    revenue given up."""
    target, rng = run.config.roi_target, np.random.default_rng(0)
    per_user = {each.multiplier: each.per_user() for each in made}
    known, size = sorted(per_user), run.config.constraint.users
    misses, given_up, best = 0, [], best_revenue(parameters, target).revenue

    def evaluate(multiplier: float, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        revenue, cost = per_user[min(known, key=lambda value: abs(value - multiplier))]
        return revenue[chosen], cost[chosen]

    for _ in range(DRAWS):
        order = rng.permutation(len(made[0].revenue))
        found = calibrate(
            partial(evaluate, chosen=order[:size]), [m for m in run.multipliers if m <= known[-1]], roi_target=target,
            confidence=run.config.constraint.confidence, new_users=new_users, refine=STEP,
        )  # fmt: skip
        revenue, cost = evaluate(found.multiplier, order[size : size + new_users])
        misses += bool(revenue.mean() < target * cost.mean())
        given_up.append(1 - revenue.mean() / best)
    print(
        f"  calibrated {DRAWS} times on {size} users for {new_users} new ones: {misses} misses, "
        f"{np.mean(given_up):.3f} of the best revenue given up (at most {np.max(given_up):.3f})",
        flush=True,
    )


@torch.no_grad()
def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="folders of finished runs in simulated environments")
    parser.add_argument("--users", type=int, default=5000, help="fresh users of each figure")
    parser.add_argument("--few", type=int, default=1000, help="of them for figures at many multipliers")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for folder in options.folders:
        run = Run.open(folder)
        parameters = run.data.parameters
        if parameters is None:
            parser.error(f"{folder} learned from a log: nobody knows the optimum there")
        seed = seed_of(run.config.seed, Stream.FRESH)
        fresh = {"users": options.users, "seed": seed}
        few = {"users": options.few, "seed": seed}
        print(
            f"{folder}: {run.config.environment}, seed {run.config.seed}, {run.config.effort}, "
            f"{sum(run.seconds.values()):.0f} s; multipliers {', '.join(f'{m:g}' for m in run.multipliers)}",
            flush=True,
        )
        calibrated(run, parameters, **fresh)
        candidates = [m for m in run.multipliers if m <= run.config.roi_target]
        between = [(a + b) / 2 for a, b in pairwise(candidates)]
        shares(run, parameters, sorted([*candidates, *between]), **few)
        made = range_of_multipliers(run, parameters, **(fresh if parameters.users_alike else few))
        if parameters.users_alike:
            repeated_calibration(run, parameters, made)


if __name__ == "__main__":
    main()
