"""Whether the amounts of a log are explained by what also explains its revenue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, Integers
from goal.log import InteractionLog

WARN = 0.02
FOLDS = 5
MOST_CATEGORIES = 20
RIDGE = 10.0
LARGEST_WEIGHT = 20.0


@dataclass(frozen=True)
class Confounding:
    """How well what is known before a decision explains the amount, and the revenue beyond the amount.

    Attributes:
        amount: share of the variance of amounts that the features explain on other users' decisions (R²), by rank;
            at or below 0 where amounts were drawn at random.
        revenue: share of the variance of revenue that the features explain beyond the amount, likewise.
        weighted: whether decisions were weighted by 1 / propensity.
        warning: a sentence for a report; empty where the two are not above 2%.
    """

    amount: float
    revenue: float
    weighted: bool
    warning: str

    @property
    def confounded(self) -> bool:
        """Whether there is a warning."""
        return bool(self.warning)


def confounding(
    amounts: Floats,
    revenue: Floats,
    features: Floats,
    *,
    users: Integers | None = None,
    propensities: Floats | None = None,
    seed: int = 0,
) -> Confounding:
    """Cross-validated R² of the amount on features, and of revenue on the same features given the amount.

    Who was paid more differed from the start where both are above 2%: then what a payment does and what marks who is
    paid cannot be told apart without the propensities. Weighted by 1 / propensity, amounts that were drawn as the
    propensities say are independent of the features again, so with propensities this checks them.

    Both are ridge regressions by rank, so that a few large baskets do not decide. What no feature shows is not found.

    Args:
        amounts: `(N,)` in the incentive's unit.
        revenue: `(N,)` in money.
        features: `(N, F)` known before the decision; NaN is missing.
        users: `(N,)` whole numbers; decisions of one user are never on both sides of the cross-validation.
        propensities: `(N,)` probabilities of the amounts, where they were logged.
        seed: of the parts.

    Raises:
        ConfigurationError: shapes do not fit, or there are too few users.
    """
    rows = len(amounts)
    users = np.arange(rows) if users is None else np.asarray(users)
    for name, given in (("revenue", revenue), ("features", features), ("users", users), ("propensities", propensities)):
        if given is not None and len(given) != rows:
            raise ConfigurationError(f"{name} has {len(given)} rows and amounts {rows}: expected one row a decision")
    names, own = np.unique(users, return_inverse=True)
    if len(names) < 2 * FOLDS:
        raise ConfigurationError(f"users: {len(names)} came; expected at least {2 * FOLDS} to tell chance from a cause")
    part = (np.random.default_rng(seed).permutation(len(names)) % FOLDS)[own]
    weights = np.ones(rows)
    if propensities is not None:
        weights = 1 / np.asarray(propensities)
        weights = np.minimum(weights, LARGEST_WEIGHT * float(np.median(weights)))
    state = _table(np.asarray(features, dtype=np.float64))
    amount, money = _ranks(amounts), _ranks(revenue)
    # The amount's own effect may bend: ten bins follow it.
    paid = np.eye(10)[np.minimum((amount * 10).astype(int), 9)]
    on_amount = _r_squared(state, amount, part, weights)
    beyond = _r_squared(np.column_stack((paid, amount, state)), money, part, weights) - _r_squared(
        np.column_stack((paid, amount)), money, part, weights
    )
    warning = ""
    if on_amount > WARN and beyond > WARN:
        figures = (
            f"what is known before a decision explains {on_amount:.0%} of the variance of the amount (by rank, on "
            f"other users) and {beyond:.0%} of the revenue's beyond the amount"
        )
        if propensities is None:
            warning = (
                f"This log is confounded: {figures}. Who was paid more differed from the start, so a difference in "
                "revenue between amounts is not what the payment did. Draw some amounts at random and log their "
                "probabilities."
            )
        else:
            warning = (
                "The propensities do not make this log's amounts as good as random: weighted by 1 / propensity, "
                f"{figures}. "
                "Either they are not the probabilities of the amounts drawn, or some users had no chance of some "
                "amounts; trust no figure for amounts that such users were never paid."
            )
    return Confounding(on_amount, beyond, propensities is not None, warning)


def state_features(log: InteractionLog, rows: Integers | None = None) -> Floats:
    """What is known before each decision, `(n, F)` with NaN where missing.

    The log's numeric features, its commonest categories as 0 or 1, and the user's past: the last amount and revenue,
    their means so far, and the number of decisions.

    Args:
        log: the log.
        rows: rows of the log, all by default.
    """
    rows = np.arange(log.events) if rows is None else np.asarray(rows)
    place, starts = log.position, np.repeat(log.offsets[:-1], np.diff(log.offsets))
    columns = [np.asarray(log.numeric[rows], dtype=np.float64)]
    for codes in np.asarray(log.categorical).T:
        counts = np.bincount(codes)
        common = np.argsort(-counts, kind="stable")[:MOST_CATEGORIES]
        columns.append((codes[rows, None] == common[counts[common] > 0]).astype(np.float64))
    for values in (log.incentives, log.revenue):
        running = np.concatenate(([0.0], np.cumsum(values)))
        before = (running[np.arange(log.events)] - running[starts]) / np.maximum(place, 1)
        last = np.asarray(values)[np.maximum(np.arange(log.events) - 1, 0)]
        columns += [np.where(place > 0, past, np.nan)[rows, None] for past in (last, before)]
    columns.append(np.log1p(place[rows, None]))
    return np.concatenate(columns, axis=1)


def _ranks(values: Floats) -> Floats:
    """Ranks in (0, 1), ties at their mean."""
    return (rankdata(values) - 0.5) / len(values)


def _table(features: Floats) -> Floats:
    """Features by rank with their squares; a missing value is in the middle and flagged."""
    columns = []
    for column in features.T:
        missing = np.isnan(column)
        known = column[~missing]
        if len(known) == 0 or known.min() == known.max():
            ranked = np.zeros(len(column))
        else:
            ranked = np.zeros(len(column))
            ranked[~missing] = _ranks(known) - 0.5
        columns += [ranked, np.square(ranked), missing.astype(np.float64)]
    table = np.column_stack(columns) if columns else np.zeros((len(features), 0))
    return table[:, table.std(axis=0) > 0]


def _r_squared(table: Floats, values: Floats, part: Integers, weights: Floats) -> float:
    """Share of the weighted variance that ridge regression explains on the parts that it was not fitted on."""
    residual, total = 0.0, 0.0
    for fold in range(FOLDS):
        kept, held = part != fold, part == fold
        middle, scale = table[kept].mean(axis=0), np.maximum(table[kept].std(axis=0), 1e-12)
        design = np.column_stack((np.ones(len(table)), (table - middle) / scale))
        penalty = np.diag(np.r_[1e-9, np.full(table.shape[1], RIDGE)])
        weighted = design[kept] * weights[kept, None]
        coefficients = np.linalg.solve(weighted.T @ design[kept] + penalty, weighted.T @ values[kept])
        mean = np.average(values[kept], weights=weights[kept])
        residual += float(weights[held] @ np.square(values[held] - design[held] @ coefficients))
        total += float(weights[held] @ np.square(values[held] - mean))
    return 1 - residual / total if total > 0 else 0.0
