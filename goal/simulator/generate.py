"""A log of simulated users under a behaviour policy."""

from __future__ import annotations

import numpy as np

from goal.log import InteractionLog, Objective, Schema
from goal.simulator.behaviour import MIXTURE, Behaviour, behaviour_policy
from goal.simulator.environment import VectorEnvironment
from goal.simulator.parameters import Parameters
from goal.simulator.users import arrivals


def log_schema(parameters: Parameters) -> Schema:
    """Schema of every log that `simulate` makes for an environment."""
    return Schema(
        user="user",
        time="time",
        incentive="incentive",
        revenue="revenue",
        numeric=parameters.numeric_names,
        cost_rate=parameters.cost_rate,
        objectives=(Objective("engaged", "binary"),),
        propensity="propensity",
        horizon=parameters.horizon,
        clock="progress",
        incentive_unit=parameters.incentive_unit,
        currency=parameters.currency,
    )


def simulate(parameters: Parameters, behaviour: str | Behaviour = MIXTURE, *, users: int, seed: int) -> InteractionLog:
    """Log of whole episodes, one a user, with the propensity of every amount.

    Users arrive staggered: user u's step t happens at time start_u + t, with start_u uniform over the horizon, so that
    a split or a stream by time meets users at every stage. Logs of different seeds have different users.

    Args:
        parameters: the environment.
        behaviour: name of a behaviour policy, or one of your own over the environment's levels.
        users: how many, U; the log has U * horizon rows.
        seed: of the users, their luck, their arrivals and what the behaviour pays them.

    Raises:
        ConfigurationError: behaviour, users or seed cannot work.

    Example:
        >>> from goal.simulator import preset, simulate
        >>> log = simulate(preset("calibrated"), "uniform", users=10, seed=0)
        >>> log.events
        1000
    """
    if isinstance(behaviour, str):
        behaviour = behaviour_policy(behaviour, parameters)
    behaviour.check_levels(parameters)
    horizon = parameters.horizon
    levels, propensity = behaviour.draw(users=users, horizon=horizon, seed=seed)
    amounts = parameters.levels[levels]
    environment = VectorEnvironment(parameters, users=users, seed=seed)
    features = np.empty((users, horizon, len(parameters.numeric_names)), dtype=np.float32)
    revenue = np.empty((users, horizon))
    engaged = np.empty((users, horizon), dtype=np.float32)
    for t in range(horizon):
        features[:, t] = environment.features()
        step = environment.step(amounts[:, t])
        revenue[:, t] = step.revenue
        engaged[:, t] = step.engaged
    start = arrivals(parameters, users=users, seed=seed)
    columns = {
        "user": np.repeat(np.arange(users), horizon),
        "time": (start[:, None] + np.arange(horizon)).ravel(),
        "incentive": amounts.ravel(),
        "revenue": revenue.ravel(),
        "engaged": engaged.ravel(),
        "propensity": propensity.ravel(),
    }
    columns |= {name: features[:, :, index].ravel() for index, name in enumerate(parameters.numeric_names)}
    return InteractionLog.from_columns(log_schema(parameters), columns)
