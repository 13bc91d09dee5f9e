"""What a policy is worth in the simulator: rolled out on fresh users, beside the exact optimum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from goal.data import Stream, seed_of
from goal.evaluation import (
    Constant,
    amount_distribution,
    behaviour_points,
    constant_points,
    ledger,
    of_first_users,
    oracle_frontier,
    oracle_violation_rate,
    promises,
    rollout,
    sweep,
)
from goal.log import Windows
from goal.model import Policy
from goal.results.estimates import PerUser
from goal.results.parts import experts, headline_of, reward_calibration, sweep_multipliers
from goal.run_folder import read_calibration
from goal.simulator import Parameters, simulate
from goal.simulator.oracle import best_revenue

if TYPE_CHECKING:
    from goal.pipeline import Run

FEW_USERS = 250
"""Users, at most, on which what takes long is set side by side: frontiers, and the policy against its own value."""


def simulated_per_user(
    policy: Policy, parameters: Parameters, *, users: int, seed: int
) -> tuple[Callable[[float], PerUser], np.ndarray]:
    """What calibration needs from the simulator: mean revenue and cost per step of each user, and of never paying."""

    def evaluate(multiplier: float) -> PerUser:
        return rollout(policy, parameters, multiplier, users=users, seed=seed).per_user()

    return evaluate, rollout(Constant(0.0), parameters, 0.0, users=users, seed=seed).per_user()[0]


def _unseen(run: Run, parameters: Parameters, *, users: int, seed: int) -> Windows:
    """Decisions of users that the reward model has not met, logged as those that it learned from were."""
    log = simulate(parameters, users=users, seed=seed)
    return Windows(log, np.arange(log.events), length=run.reward.window)


def evaluate_simulated(run: Run, policy: Policy, parameters: Parameters) -> dict[str, Any]:
    """The artefacts of rollouts on fresh users: headline, sweep, and where value is lost."""
    config = run.config
    settings = config.evaluation
    users = settings.users or (2000 if parameters.users_alike else 1000)
    seed, interactions = seed_of(config.seed, Stream.TEST), users * parameters.horizon
    multipliers = sweep_multipliers(run)
    common = {
        "users": users, "seed": seed, "roi_target": config.roi_target,
        "window": settings.window(interactions), "stride": settings.stride(interactions),
    }  # fmt: skip
    swept = sweep(policy, parameters, multipliers, **common)
    calibration = read_calibration(run.folder)
    chosen = sweep(policy, parameters, [calibration["multiplier"]], **common, oracle=False)
    row = chosen.rows[0]
    # The bound is on the average ROI, and holds where all users are alike.
    bounded = config.constraint.roi == "average" and parameters.users_alike
    best = best_revenue(parameters, config.roi_target) if bounded else None
    headline = {
        **headline_of(run, row, calibration, interactions),
        "users": users,
        "never_pay_rev": chosen.never_pay_rev,
    }
    if best is not None:
        headline |= {"best_rev": best[1], "share_of_best": row["rev"] / best[1] if row["rev"] is not None else None}
    if parameters.users_alike and row["roi"] is not None:
        headline["oracle_rvr"] = oracle_violation_rate(
            parameters, row["roi"], target=config.roi_target,
            **{name: common[name] for name in ("users", "seed", "window", "stride")},
        )  # fmt: skip
    few = {"users": min(users, FEW_USERS), "seed": seed}
    compared = of_first_users(
        swept, parameters, few["users"], seed=seed, roi_target=config.roi_target, window=few["users"]
    )
    seen = None if run.reward.window > 1 else 1
    return {
        "headline": headline,
        "sweep": list(swept.rows),
        "frontier": {
            "oracle": oracle_frontier(parameters, multipliers, users=users, seed=seed),
            "behaviour": behaviour_points(parameters, **few),
            "constants": constant_points(parameters, **few),
        },
        "amounts": amount_distribution({made.multiplier: made.amounts for made in swept.rollouts}, parameters.levels),
        "experts": experts(run, policy, multipliers),
        "diagnostics": {
            "reward_calibration": reward_calibration(run.reward, _unseen(run, parameters, **few)),
            "ledger": ledger(run.reward, parameters, compared, window=seen, seed=seed),
            "planned": run.reward.planned is not None,
            "promises": promises(
                run.values_in_the_making(),
                parameters,
                multipliers[:: max(1, (len(multipliers) - 1) // 2)],
                window=seen,
                users=min(users, 200),
                seed=seed,
            ),
        },
    }
