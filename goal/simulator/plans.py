"""The best that a plan can reach which ignores what users do: what there is to gain from looking at their history.

Shapes: U users, P plans, T steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from goal.simulator.oracle import plans_revenue, solve_users
from goal.simulator.parameters import Floats, Parameters
from goal.simulator.users import draw_users

_BLOCK = 64


class Plan(NamedTuple):
    """Amounts (T,) paid to everybody alike, where they come from, and figures per step as in `Oracle`."""

    amounts: Floats
    kind: str
    value: float
    revenue: float
    cost: float


def best_plan(
    parameters: Parameters, multiplier: float, *, users: int, seed: int, types: int = 100, longest_period: int = 12
) -> Plan:
    """The best of the plans that anybody would try: constant amounts, periodic pulses, and optimal plans of one type.

    Args:
        parameters: the environment.
        multiplier: what a unit of cost takes from the value.
        users: how many users a plan is paid to; those of `VectorEnvironment` with the same seed. Values are exact.
        seed: of the users.
        types: other users, of the next seed, whose own optimal plans are tried.
        longest_period: pulses are paid every 2, 3, ... this many steps, from the first on.

    Raises:
        ConfigurationError: multiplier, users or seed cannot work.

    Example:
        >>> from goal.simulator import preset
        >>> plan = best_plan(preset("calibrated"), 1.0, users=1, seed=0, types=1)
        >>> plan.kind, round(plan.value, 2)
        ('one type', 9.94)
    """
    solved = solve_users(parameters, multiplier, users=types, seed=seed + 1).plan
    steps = np.arange(parameters.horizon)
    positive = parameters.levels[parameters.levels > 0]
    plans = [("constant", np.full(parameters.horizon, level)) for level in parameters.levels]
    plans += [
        ("pulses", np.where(steps % period == 0, level, 0.0))
        for period in range(2, longest_period + 1)
        for level in positive
    ]
    plans += [("one type", plan) for plan in np.unique(solved, axis=0)]
    amounts = np.stack([plan for _, plan in plans])
    everybody = draw_users(parameters, users=users, seed=seed)
    revenue = np.concatenate(
        [plans_revenue(parameters, everybody, amounts[i : i + _BLOCK]) for i in range(0, len(plans), _BLOCK)]
    )
    cost = parameters.cost(amounts).mean(axis=1)
    best = int((revenue - multiplier * cost).argmax())
    kind, chosen = plans[best]
    return Plan(chosen, kind, float(revenue[best] - multiplier * cost[best]), float(revenue[best]), float(cost[best]))
