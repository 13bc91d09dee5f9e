"""Planning of `PlannedValue`: what is worth how much, from the last step of an episode back to its first.

Shapes: N planned states, D features, G amounts of the grid, n multipliers, K bins of revenue.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from goal.log import InteractionLog
from goal.reward import PlannedValue, RewardModel
from goal.reward.planned import RANK
from goal.training.loop import MetricsFile
from goal.training.transitions import Transitions

MOST_STATES = 8192
"""States that are planned from."""
MOST_BYTES = 400e6
"""Of the mean features of their next states, at most; more amounts leave fewer states."""
POSITIVE_DRAWS = 2
"""Positive outcomes drawn for each state and amount; the chance that nothing comes in is taken exactly."""
RIDGE = 1e-5
"""Of the values' least squares, over features of variance around 1."""
EFFECT_RIDGE = 1e-4
"""Of the regression of next features on present ones."""
LEFT = 0.01
"""Share of the value that is still missing where there is no last step to plan from."""
LINES = 10
"""Lines that the metrics get."""


@torch.no_grad()
def plan(
    reward: RewardModel,
    log: InteractionLog,
    rows: np.ndarray,
    *,
    generator: torch.Generator,
    metrics: MetricsFile | None = None,
) -> None:
    """Fill `reward.planned`.

    V_t(s) = max_a r(s, a) - lambda * c(s, a) + discount * E[V_{t+1}(next s)], fitted at N logged states, for every
    multiplier; cost-to-go is read off along the best amounts. With a clock the last step comes first and nothing
    follows it; dynamics do not depend on the clock (see `DecisionState`), so the same states serve every step. Without
    one the recursion is repeated until `LEFT` of the value is missing, and the logged end of an episode ends it.

    The same luck serves all amounts of a state, so that what differs between them is their doing.

    Args:
        reward: with a trained P-Score that leaves the past out.
        log: the log.
        rows: training rows, ascending.
        generator: on the CPU.
        metrics: gets the fit of some steps, as those of the stage "value".

    Raises:
        ConfigurationError: no decision is followed by another.
    """
    planned, transitions = reward.planned, Transitions(reward, log, rows)
    assert planned is not None
    width = len(planned.centre)
    count = min(MOST_STATES, len(transitions), max(2, int(MOST_BYTES / (4 * len(reward.grid) * width))))
    indices = transitions.draw(count, generator)
    states = transitions.states(indices)
    _choose_features(planned, states, generator)
    features = planned.features(states)
    following = _following(reward, planned, transitions, indices, states, generator)

    exact = features.double()  # sums of thousands of products: in single precision it need not be positive definite
    covariance = exact.T @ exact / count
    values = _Values(reward, planned, states, following, transitions.going_on[indices].to(features.device))
    fit = _least_squares(covariance, features, RIDGE)
    steps = planned.horizon or math.ceil(math.log(LEFT) / math.log(max(reward.discount, LEFT)))
    every = max(1, steps // LINES)
    weights = features.new_zeros(len(planned.level), width, planned.level.shape[1])
    for part in (planned.level, planned.low, planned.high):
        part.zero_()  # what follows the last step is worth nothing
    for ahead in range(steps):
        # With a clock, step `horizon - 1 - ahead` from the one after it; without one, the one from itself.
        step, later = (0, 0) if planned.horizon is None else (steps - 1 - ahead, steps - ahead)
        value = values.best(weights[later], later)
        planned.level[step], planned.low[step], planned.high[step] = value.mean(0), value.amin(0), value.amax(0)
        weights[step] = fit @ (value - planned.level[step])
        if metrics is not None and (ahead % every == 0 or ahead == steps - 1):
            error = features @ weights[step] + planned.level[step] - value
            _log(metrics, ahead, value, error)
    _reduce(planned, weights, covariance, features, following)


def _choose_features(planned: PlannedValue, states: torch.Tensor, generator: torch.Generator) -> None:
    """Draw random features of standardised states; a column that never changes plays no part."""
    spread = states.std(dim=0, correction=0)
    varies = spread > 1e-4 * (1 + states.mean(dim=0).abs())
    planned.mean.copy_(states.mean(dim=0))
    planned.spread.copy_(spread.where(varies, torch.inf))
    direction = torch.randn(planned.direction.shape, generator=generator) / max(1, int(varies.sum())) ** 0.5
    planned.direction.copy_(direction)
    planned.phase.copy_(torch.randn(planned.phase.shape, generator=generator))
    planned.centre.zero_()
    planned.centre.copy_(planned.features(states).mean(dim=0))


def _following(
    reward: RewardModel,
    planned: PlannedValue,
    transitions: Transitions,
    indices: torch.Tensor,
    states: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean features `(N, G, D)` of the states that follow each amount."""
    grid = reward.grid
    following = states.new_empty(len(indices), len(grid), len(planned.centre))
    for part in torch.arange(len(indices)).split(256):
        chances = reward.pscore.chances(states[part], grid).cpu()
        positive = chances[..., 1:].cumsum(dim=-1)
        anything = positive[..., -1:].clamp(min=1e-9)
        luck = torch.rand(1 + 2 * POSITIVE_DRAWS, len(part), 1, generator=generator).expand(-1, -1, len(grid))
        draws = [(chances[..., :1], torch.zeros(chances.shape[:2], dtype=torch.int64), luck[0])]
        for which, among in luck[1:].unflatten(0, (POSITIVE_DRAWS, 2)):
            bins = torch.searchsorted(positive / anything, which[..., None].contiguous())[..., 0]
            draws.append((positive[..., -1:] / POSITIVE_DRAWS, 1 + bins.clamp(max=positive.shape[-1] - 1), among))
        repeated, amounts = indices[part].repeat_interleave(len(grid)), grid.cpu().repeat(len(part))
        total = following.new_zeros(len(part), *following.shape[1:])
        for chance, bins, among in draws:
            outcomes = transitions.outcomes(bins.flatten(), among.flatten())
            found = planned.features(transitions.after(repeated, amounts, outcomes))
            total += chance.to(grid.device) * found.view_as(total)
        following[part] = total
    return following


class _Values:
    """One step back: the value `(N, 2 n)` of the planned states, utilities before costs."""

    def __init__(
        self,
        reward: RewardModel,
        planned: PlannedValue,
        states: torch.Tensor,
        following: torch.Tensor,
        going_on: torch.Tensor,
    ) -> None:
        revenue, cost = reward.immediate(states)
        self.cost = cost[..., None]
        self.utility = revenue[..., None] - reward.multipliers * self.cost
        self.discount, self.planned, self.following = reward.discount, planned, following
        self.going_on = going_on[:, None, None]

    def best(self, weights: torch.Tensor, later: int) -> torch.Tensor:
        """Under the best amounts, given the weights of the step that follows."""
        planned = self.planned
        values = (self.following @ weights + planned.level[later]).clamp(planned.low[later], planned.high[later])
        utility, cost = (self.discount * self.going_on * values).chunk(2, dim=-1)
        best = (self.utility + utility).max(dim=1, keepdim=True)
        return torch.cat([best.values[:, 0], (self.cost + cost).gather(1, best.indices)[:, 0]], dim=-1)


def _least_squares(covariance: torch.Tensor, features: torch.Tensor, ridge: float) -> torch.Tensor:
    """Matrix `(D, N)` that gives the weights of values `(N,)` with mean 0."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    solved = torch.linalg.solve(covariance + ridge * identity, features.T.double() / len(features))
    return solved.to(features.dtype)


def _reduce(
    planned: PlannedValue,
    weights: torch.Tensor,
    covariance: torch.Tensor,
    features: torch.Tensor,
    following: torch.Tensor,
) -> None:
    """Keep the `RANK` directions in which the values of all steps vary most, and what each amount does to those.

    Directions are measured by the values they make of the planned states, each step and multiplier relative to its own
    spread.
    """
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(covariance + RIDGE * identity)
    columns = root.T @ weights.transpose(0, 1).flatten(1).double()
    alike = columns / columns.norm(dim=0).clamp(min=1e-12)
    directions = torch.linalg.eigh(alike @ alike.T).eigenvectors[:, -RANK:]  # eigenvalues ascend
    planned.weights.copy_((directions.T @ columns).unflatten(1, weights.shape[::2]).transpose(0, 1))
    basis = torch.linalg.solve_triangular(root.T, directions, upper=True).to(features.dtype)
    reduced = (following @ basis).flatten(1)
    planned.offset.copy_(reduced.mean(dim=0))
    planned.effect.copy_(_least_squares(covariance, features, EFFECT_RIDGE) @ (reduced - planned.offset))


def _log(metrics: MetricsFile, ahead: int, value: torch.Tensor, error: torch.Tensor) -> None:
    utility, cost = value.chunk(2, dim=-1)
    spread = utility.std(dim=0, correction=0).clamp(min=1e-9)
    fit_error = error[:, : utility.shape[1]].square().mean(dim=0).sqrt() / spread
    metrics.append(
        "value",
        ahead,
        {
            "fit_error": float(fit_error.max()),
            "utility_to_go": float(utility[:, 0].mean()),
            "utility_to_go_strict": float(utility[:, -1].mean()),
            "cost_to_go": float(cost[:, 0].mean()),
        },
    )
