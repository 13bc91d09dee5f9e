"""The best that any policy can reach, by dynamic programming, and the best constant amount.

Fatigue is the only state and moves deterministically, so the finite-horizon value over a fatigue grid,

    V_t(f) = max_a  revenue(a, f) - multiplier * cost(a) + V_{t+1}(rho * f + eta * g(a)),    V_T = 0,

interpolated linearly between grid points, gives a policy whose exact revenue and cost are then summed along its own
path. The grid's error enters the reported value at second order only, through near ties between amounts.
A user's type and fatigue are known to the oracle: where a policy does not see them, the oracle is a bound for it.

Shapes: U users, n levels, G grid points, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError
from goal.simulator.parameters import Floats, Parameters
from goal.simulator.users import UserTypes, draw_users, middle_user

# Users solved together: enough to hide NumPy's call overhead, few enough that a step's arrays stay in the cache.
_BLOCK = 8


@dataclass(frozen=True, eq=False)
class Oracle:
    """Best policy for one multiplier; figures per step and in currency, averaged over the users.

    value = revenue - multiplier * cost; roi = revenue / cost, infinite where nothing is paid. plan (U, T) holds the
    amounts paid from fatigue 0, user_revenue and user_cost (U,) each user's figures, U = 1 for one user.
    policy(fatigue (N,), t) -> amounts (N,); for several users N must be U, and the policy is their plan, which is
    optimal on its own path.
    """

    value: float
    revenue: float
    cost: float
    roi: float
    policy: Callable[[ArrayLike, int], Floats]
    plan: Floats
    user_revenue: Floats
    user_cost: Floats


class ConstantAmount(NamedTuple):
    """The best amount to pay everybody at every step, 0 included; figures per step as in `Oracle`."""

    amount: float
    value: float
    revenue: float
    cost: float


class FrontierPoint(NamedTuple):
    """The most revenue that meets a target ROI, and the multiplier where it lies; figures per step as in `Oracle`."""

    multiplier: float
    revenue: float
    cost: float


def solve(parameters: Parameters, multiplier: float, *, grid: int = 2001) -> Oracle:
    """Best policy for one user, the middle one where the users of the environment differ.

    Args:
        parameters: the environment.
        multiplier: what a unit of cost takes from the value.
        grid: points of the fatigue grid.

    Raises:
        ConfigurationError: the multiplier or the grid cannot work.
    """
    types = middle_user(parameters)
    _check(multiplier, grid)
    values = _backward(parameters, types, multiplier, grid)
    step = _Lookahead(parameters, types, multiplier, grid)

    def policy(fatigue: ArrayLike, t: int) -> Floats:
        if not 0 <= t < parameters.horizon:
            raise ConfigurationError(f"t must lie in [0, {parameters.horizon}), the steps of an episode, got {t}")
        fatigue = np.asarray(fatigue, dtype=np.float64)
        return parameters.levels[step.best(fatigue[None], values[t + 1])[0]]

    plan = _follow(parameters, step, values)
    return _oracle(parameters, types, multiplier, plan, policy)


@lru_cache(maxsize=16)
def solve_users(parameters: Parameters, multiplier: float, *, users: int, seed: int, grid: int = 201) -> Oracle:
    """Best policy for each of the users that `VectorEnvironment` draws for the same arguments, averaged over them.

    Where the users do not differ this is `solve`. About 4 s for 1,000 users of `population` on one core; the latest
    results are kept. On 200 of them, at multipliers 0 to 3, a grid eight times as fine adds at most 4e-5 of the value.

    Args:
        parameters: the environment.
        multiplier: what a unit of cost takes from the value.
        users: how many, U.
        seed: of the users.
        grid: points of each user's fatigue grid.

    Raises:
        ConfigurationError: multiplier, users, seed or grid cannot work.
    """
    _check(multiplier, grid)
    types = draw_users(parameters, users=users, seed=seed)
    plan = np.empty((users, parameters.horizon))
    if parameters.users_alike:
        plan[:] = solve(parameters, multiplier).plan
    else:
        for start in range(0, users, _BLOCK):
            block = types.select(slice(start, start + _BLOCK))
            values = _backward(parameters, block, multiplier, grid)
            plan[start : start + _BLOCK] = _follow(parameters, _Lookahead(parameters, block, multiplier, grid), values)

    def policy(fatigue: ArrayLike, t: int) -> Floats:
        if np.shape(fatigue) != (users,):
            raise ConfigurationError(
                f"fatigue must have shape ({users},), one a solved user, got {np.shape(fatigue)}: roll out those users"
            )
        return plan[:, t]

    return _oracle(parameters, types, multiplier, plan, policy)


def best_constant(
    parameters: Parameters, multiplier: float, *, users: int | None = None, seed: int = 0
) -> ConstantAmount:
    """The best constant amount, never paying included; exact, since fatigue is deterministic. A tie pays less.

    Args:
        parameters: the environment.
        multiplier: what a unit of cost takes from the value.
        users: None for the middle user; else one amount for all the users that `VectorEnvironment` draws.
        seed: of the users.

    Raises:
        ConfigurationError: multiplier, users or seed cannot work.
    """
    _check(multiplier)
    types = middle_user(parameters) if users is None else draw_users(parameters, users=users, seed=seed)
    revenue = plans_revenue(parameters, types, np.tile(parameters.levels[:, None], parameters.horizon))
    cost = parameters.cost(parameters.levels)
    values = revenue - multiplier * cost
    best = int(values.argmax())
    return ConstantAmount(float(parameters.levels[best]), float(values[best]), float(revenue[best]), float(cost[best]))


def plans_revenue(parameters: Parameters, users: UserTypes, plans: Floats) -> Floats:
    """Exact mean revenue per step, shape (P,), of paying all users by each of the plans (P, T), in currency."""
    types = users.expand(2)
    responses = parameters.g(plans)
    fatigue = np.zeros((len(users), len(plans)))
    engagements = np.zeros(len(plans))
    for t in range(parameters.horizon):
        engagements += types.probability(responses[:, t], fatigue).mean(axis=0)
        fatigue = types.rho * fatigue + parameters.eta * responses[:, t]
    return parameters.revenue_per_engagement * engagements / parameters.horizon


def users_revenue(parameters: Parameters, users: UserTypes, amounts: Floats) -> Floats:
    """Exact mean revenue per step of each user, shape (U,), of paying them the amounts (U, T), in currency."""
    responses = parameters.g(amounts)
    fatigue, engagements = np.zeros(len(users)), np.zeros(len(users))
    for t in range(parameters.horizon):
        engagements += users.probability(responses[:, t], fatigue)
        fatigue = users.rho * fatigue + parameters.eta * responses[:, t]
    return parameters.revenue_per_engagement / parameters.horizon * engagements


def best_revenue(parameters: Parameters, roi_target: float) -> FrontierPoint:
    """The most revenue of the middle user with revenue >= roi_target * cost, from the oracle's frontier.

    The maximum of revenue + mu * (revenue - roi_target * cost) is the oracle at multiplier mu * roi_target / (1 + mu)
    (the paper's dual relationship), which lies in [0, roi_target]. The frontier has a corner for every plan; between
    two corners the point is reached by giving some users one plan and the rest the other.

    Args:
        parameters: the environment.
        roi_target: revenue that a unit of cost must bring.

    Raises:
        ConfigurationError: the target is not above 0.
    """
    if not 0 < roi_target < np.inf:
        raise ConfigurationError(f"roi_target must be above 0 and finite, got {roi_target}: give a ratio such as 3.0")

    def surplus(oracle: Oracle) -> float:
        return oracle.revenue - roi_target * oracle.cost

    low, high = 0.0, float(roi_target)
    generous, frugal = solve(parameters, low), solve(parameters, high)
    if surplus(generous) >= 0:
        return FrontierPoint(low, generous.revenue, generous.cost)
    # At the target itself the oracle's value is its surplus, and never paying has a positive one.
    while high - low > 1e-3:
        middle = (low + high) / 2
        oracle = solve(parameters, middle)
        if surplus(oracle) >= 0:
            high, frugal = middle, oracle
        else:
            low, generous = middle, oracle
    share = surplus(frugal) / (surplus(frugal) - surplus(generous))
    return FrontierPoint(
        high,
        share * generous.revenue + (1 - share) * frugal.revenue,
        share * generous.cost + (1 - share) * frugal.cost,
    )


def immediate_threshold(parameters: Parameters, fatigue: float = 0.0) -> float:
    """Multiplier from which on the best immediate response of the middle user is not to pay (Proposition 1).

    max_i (r_i - r_1) / (c_i - c_1) over the levels, with r_i the mean revenue of the next step at this fatigue.

    Args:
        parameters: the environment.
        fatigue: of the user, as in `Step.fatigue`.
    """
    revenue = parameters.expected_revenue(parameters.levels, fatigue)
    return float(((revenue[1:] - revenue[0]) / parameters.cost(parameters.levels[1:])).max())


class _Lookahead:
    """Value of paying each level at any fatigue, given the next step's values on each user's grid."""

    def __init__(self, parameters: Parameters, types: UserTypes, multiplier: float, grid: int) -> None:
        self.parameters = parameters
        self.types = types.expand(3)
        self.grid = grid
        self.costs = multiplier * parameters.cost(parameters.levels)[:, None]
        self.responses = parameters.level_responses[:, None]
        self.spacing = _highest_fatigue(parameters, types)[:, None, None] / (grid - 1)
        self.offsets = (np.arange(len(types)) * grid)[:, None, None]

    def immediate(self, fatigue: Floats) -> tuple[Floats, Floats]:
        """Immediate value, and next fatigue, of each level at fatigue (U, N), both (U, n, N)."""
        fatigue = fatigue[:, None, :]
        revenue = self.parameters.revenue_per_engagement * self.types.probability(self.responses, fatigue)
        return revenue - self.costs, self.types.rho * fatigue + self.parameters.eta * self.responses

    def locate(self, fatigue: Floats) -> tuple[NDArray[np.intp], Floats]:
        """Index into the flattened (U, G) grids of the point at or below each fatigue (U, n, N), and its remainder."""
        position = np.minimum(fatigue / self.spacing, self.grid - 1)
        below = np.minimum(position.astype(np.intp), self.grid - 2)
        return below + self.offsets, position - below

    def best(self, fatigue: Floats, values: Floats) -> NDArray[np.intp]:
        """Index of the best level at fatigue (U, N) given the next values (U, G), shape (U, N); ties pay less."""
        now, following = self.immediate(fatigue)
        below, remainder = self.locate(following)
        flat = values.reshape(-1)
        return (now + flat[below] * (1 - remainder) + flat[below + 1] * remainder).argmax(1)


def _backward(parameters: Parameters, types: UserTypes, multiplier: float, grid: int) -> Floats:
    """Values V_t on each user's fatigue grid, shape (T + 1, U, G)."""
    step = _Lookahead(parameters, types, multiplier, grid)
    fatigue = np.arange(grid) * step.spacing[:, 0]
    now, following = step.immediate(fatigue)
    # Neither depends on t, so a step back is two gathers, two multiplications and a maximum.
    below, remainder = step.locate(following)
    above = below + 1
    complement = 1 - remainder
    values = np.zeros((parameters.horizon + 1, len(types), grid))
    total, upper = np.empty_like(now), np.empty_like(now)
    for t in reversed(range(parameters.horizon)):
        flat = values[t + 1].reshape(-1)
        # "clip" only because the default mode copies `out` through a buffer; every index is in range.
        np.take(flat, below, out=total, mode="clip")
        np.take(flat, above, out=upper, mode="clip")
        total *= complement
        upper *= remainder
        total += upper
        total += now
        total.max(1, out=values[t])
    return values


def _follow(parameters: Parameters, step: _Lookahead, values: Floats) -> Floats:
    """Amounts (U, T) that the best policy pays from fatigue 0."""
    users = values.shape[1]
    plan = np.empty((users, parameters.horizon))
    fatigue = np.zeros((users, 1))
    for t in range(parameters.horizon):
        levels = step.best(fatigue, values[t + 1])
        plan[:, t] = parameters.levels[levels[:, 0]]
        fatigue = step.types.rho[:, 0] * fatigue + parameters.eta * parameters.level_responses[levels]
    return plan


def _oracle(
    parameters: Parameters,
    types: UserTypes,
    multiplier: float,
    plan: Floats,
    policy: Callable[[ArrayLike, int], Floats],
) -> Oracle:
    """Exact figures of paying a plan (U, T)."""
    revenue, cost = users_revenue(parameters, types, plan), parameters.cost(plan).mean(1)
    for figures in (plan, revenue, cost):
        figures.setflags(write=False)
    total_revenue, total_cost = float(revenue.mean()), float(cost.mean())
    roi = total_revenue / total_cost if total_cost else float("inf")
    value = total_revenue - multiplier * total_cost
    return Oracle(value, total_revenue, total_cost, roi, policy, plan, revenue, cost)


def _highest_fatigue(parameters: Parameters, types: UserTypes) -> Floats:
    """Fatigue that each user can reach within an episode, shape (U,); 1 where incentives do not tire."""
    reach = parameters.eta * parameters.level_responses[-1] * (1 - types.rho**parameters.horizon) / (1 - types.rho)
    return np.where(reach > 0, reach, 1.0)


def _check(multiplier: float, grid: int = 2) -> None:
    if not np.isfinite(multiplier):
        raise ConfigurationError(f"multiplier must be finite, got {multiplier}: give a number such as 1.0")
    if grid < 2:
        raise ConfigurationError(f"grid must have at least 2 points, got {grid}: the default is fine enough")
