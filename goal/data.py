"""What a run learns from: a log with its splits, whether simulated or read from a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from goal.config import RunConfig
from goal.errors import ConfigurationError
from goal.log import FeatureScaling, InteractionLog, Schema, Splits, Windows, read, split_by_time
from goal.reward.bins import Bins
from goal.reward.pscore import COST, REVENUE
from goal.simulator import Parameters, load, simulate

MOST_LISTED_AMOUNTS = 64
"""A log with no more distinct amounts than this names the amounts that may be paid."""


class Stream(IntEnum):
    """What a run draws by a seed of its own, so that the users of log, calibration and test never coincide."""

    LOG = 0
    CALIBRATION = 1
    TEST = 2
    FRESH = 9
    """Users that no stage of a run has met."""
    PRETRAINING = 17
    PSCORE = 18
    VALUE = 19
    SCPO = 20


def seed_of(seed: int, stream: Stream) -> int:
    """Return the seed of one stream of a run."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


@dataclass(frozen=True, eq=False)
class Data:
    """A log, its splits, and the simulator that it came from, if any.

    Attributes:
        log: the log.
        splits: by time for a real log. A simulated log is all training: calibration and test have users of their own
            (docs/decisions.md 13).
        parameters: the simulated environment, or None.
        seed: of the run.
        maximum_amount: the largest that may be paid; the log may hold larger ones.
    """

    log: InteractionLog
    splits: Splits
    parameters: Parameters | None
    seed: int
    maximum_amount: float = math.inf

    @cached_property
    def scaling(self) -> FeatureScaling:
        """Scales of the training rows."""
        return FeatureScaling.fit(self.log, self.splits.training)

    @property
    def schema(self) -> Schema:
        """The log's schema."""
        return self.log.schema

    @property
    def cost_rate(self) -> float | None:
        """Cost of one unit of incentive where a rule gives it; None: the cost is fitted (docs/decisions.md 15)."""
        return self.schema.known_cost_rate

    @property
    def clock(self) -> int | None:
        """Index of the numeric feature that is the share of the episode that has passed."""
        name = self.schema.clock
        return None if name is None else self.schema.numeric.index(name)

    @cached_property
    def distinct_amounts(self) -> np.ndarray:
        """Distinct amounts of the training rows that may be paid, ascending.

        Raises:
            ConfigurationError: no amount above 0 may be.
        """
        amounts = np.unique(self.log.incentives[self.splits.training])
        payable = amounts[amounts <= self.maximum_amount]
        if not (payable > 0).any() and (amounts > 0).any():
            raise ConfigurationError(
                f"maximum_amount={self.maximum_amount:g}: the smallest amount of the log is "
                f"{amounts[amounts > 0][0]:g}, so nothing could be paid; raise it"
            )
        return payable

    @cached_property
    def allowed_amounts(self) -> tuple[float, ...] | None:
        """The amounts that may be paid where the log has few distinct ones, never paying included; else None."""
        amounts = np.union1d(self.distinct_amounts, [0.0])
        return tuple(amounts.tolist()) if len(amounts) <= MOST_LISTED_AMOUNTS else None

    @cached_property
    def outcome_bins(self) -> dict[str, Bins]:
        """Bins of revenue, cost and the amounts among the objectives, from the training rows."""
        rows, log = self.splits.training, self.log
        columns = {REVENUE: log.revenue, COST: log.cost}
        columns |= {o.name: log.objectives[:, k] for k, o in enumerate(self.schema.objectives) if o.kind == "amount"}
        return {name: Bins.fit(values[rows]) for name, values in columns.items()}

    def grid(self, size: int) -> np.ndarray:
        """Amounts at which values are compared, ascending from 0.

        Every allowed amount where they are listed; else 0 and ``size`` - 1 quantiles of the positive training amounts
        up to the 99th percentile: a single huge amount says little about what paying it brings.
        """
        if self.allowed_amounts is not None:
            return np.array(self.allowed_amounts)
        amounts = self.log.incentives[self.splits.training]
        amounts = amounts[(amounts > 0) & (amounts <= self.maximum_amount)]
        quantiles = np.quantile(amounts, np.linspace(0, 0.99, size - 1), method="inverted_cdf")
        return np.unique(np.r_[0.0, quantiles])

    def windows(self, rows: np.ndarray, length: int) -> Windows:
        """Windows of the log that end at ``rows``."""
        return Windows(self.log, rows, length=length)


def load_data(config: RunConfig) -> Data:
    """Simulate or read the log of a run.

    Raises:
        ConfigurationError, SchemaError, LogError: environment, schema or log cannot work.
    """
    cap = math.inf if config.maximum_amount is None else config.maximum_amount
    if config.log is not None:
        assert config.schema is not None
        log = read(config.log, Schema.load(config.schema))
        splits = split_by_time(log)
        users = len(np.unique(log.user_index[splits.calibration]))
        if users < 2:
            raise ConfigurationError(
                f"{config.log}: the calibration part of the log (15% of its events, by time) holds {users} users; at "
                f"least 2 are needed"
            )
        # A category that training never saw is unknown: nothing would have trained its embedding.
        return Data(log.keep_categories(splits.training), splits, None, config.seed, cap)
    parameters = load(config.environment or "calibrated")
    log = simulate(parameters, users=config.simulated_users, seed=seed_of(config.seed, Stream.LOG))
    nothing = np.zeros(0, dtype=np.int64)
    return Data(log, Splits(np.arange(log.events), nothing, nothing), parameters, config.seed, cap)
