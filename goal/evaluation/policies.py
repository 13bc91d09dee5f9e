"""Policies to compare with: constant amounts, random amounts, and the oracle that sees what is hidden."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from goal.log import History
from goal.simulator import Parameters, VectorEnvironment
from goal.simulator.oracle import Oracle, solve_users


class Allocator(Protocol):
    """Anything that can be rolled out: B windows of history and B multipliers in, B amounts out.

    It may have `config.window`, the number of events it wants to see; 16 where it has none.
    """

    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """Amounts `(B,)` in incentive units, float64, for multipliers `(B,)`."""
        ...


@runtime_checkable
class PrivilegedPolicy(Protocol):
    """A policy that reads the environment itself, hidden state included, instead of a history."""

    def allocate_privileged(self, environment: VectorEnvironment, multiplier: float) -> np.ndarray:
        """Amounts `(users,)` in incentive units for the environment's next step."""
        ...


class Constant:
    """Pays everybody the same amount at every step; `Constant(0)` never pays.

    Args:
        amount: In incentive units.
    """

    def __init__(self, amount: float) -> None:
        self.amount = float(amount)

    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """See `Allocator`."""
        return torch.full((len(history),), self.amount, dtype=torch.float64)


class Uniform:
    """Pays one of the given amounts at random, each equally likely.

    Args:
        amounts: `(n,)`, in incentive units.
        seed: Seeds the draws; the same object goes on with its stream from one rollout to the next.
    """

    def __init__(self, amounts: np.ndarray, *, seed: int) -> None:
        self.amounts = torch.as_tensor(np.array(amounts, dtype=np.float64))
        self.generator = torch.Generator().manual_seed(seed)

    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """See `Allocator`."""
        return self.amounts[torch.randint(len(self.amounts), (len(history),), generator=self.generator)]


class OraclePolicy:
    """The exact optimum of `goal.simulator.oracle`, which knows each user's fatigue and type.

    It is solved once for each multiplier and batch of users that it meets. Nothing that learns from histories alone
    can do better on average.
    """

    def __init__(self) -> None:
        self._solved: dict[tuple[Parameters, float, int, int], Oracle] = {}

    def allocate_privileged(self, environment: VectorEnvironment, multiplier: float) -> np.ndarray:
        """See `PrivilegedPolicy`."""
        key = (environment.parameters, float(multiplier), environment.users, environment.seed)
        if key not in self._solved:
            parameters, multiplier, users, seed = key
            self._solved[key] = solve_users(parameters, multiplier, users=users, seed=seed)
        return self._solved[key].policy(environment.fatigue, environment.time)
