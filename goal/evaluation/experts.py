"""Which experts a policy uses at which multiplier (appendix "Constraint-aware Experts" of the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class ExpertUsage:
    """Average use of each expert at each multiplier.

    Attributes:
        multipliers: `(n,)`, ascending.
        usage: `(n, experts)`, rows sum to 1.
    """

    multipliers: NDArray[np.float64]
    usage: NDArray[np.float64]

    @property
    def effective_experts(self) -> NDArray[np.float64]:
        """`(n,)`, the exponential of the entropy of each row: 1 where one expert does it all, else up to `experts`."""
        logarithms = np.log(np.where(self.usage > 0, self.usage, 1.0))
        return np.exp(-(self.usage * logarithms).sum(axis=1))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists for JSON."""
        return {"multipliers": self.multipliers.tolist(), "usage": self.usage.tolist()}


def expert_usage(routing: ArrayLike, multipliers: ArrayLike) -> ExpertUsage:
    """Averages routing statistics over all tokens that were routed under the same multiplier.

    Args:
        routing: `(N, experts)`, what each token gave each expert: the gate's probabilities for the paper's figure, or
            the renormalised weights of the chosen experts. Rows are normalised to sum to 1.
        multipliers: `(N,)`, the multiplier each token was generated under.

    Raises:
        ConfigurationError: Shapes disagree, or a row is negative, not finite or all zero.

    >>> usage = expert_usage([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]], [0.0, 0.0, 3.0])
    >>> usage.usage.round(2).tolist()
    [[0.7, 0.3], [0.1, 0.9]]
    """
    routing = np.asarray(routing, dtype=np.float64)
    multipliers = np.asarray(multipliers, dtype=np.float64)
    if routing.ndim != 2 or routing.size == 0 or multipliers.shape != routing.shape[:1]:
        raise ConfigurationError(
            f"routing has shape {routing.shape} and multipliers {multipliers.shape}: expected (N, experts) and (N,)"
        )
    totals = routing.sum(axis=1)
    if not np.isfinite(routing).all() or (routing < 0).any() or (totals <= 0).any():
        raise ConfigurationError("routing holds a row that is negative, not finite or all zero: expected shares")
    distinct, index = np.unique(multipliers, return_inverse=True)
    usage = np.zeros((distinct.size, routing.shape[1]))
    np.add.at(usage, index, routing / totals[:, None])
    return ExpertUsage(distinct, usage / np.bincount(index)[:, None])
