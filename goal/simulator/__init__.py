"""Synthetic environments: users who respond to incentives and tire of them, behaviour policies, and the exact oracle.

parameters.py    what an environment is; presets and TOML files
users.py         the users' own parameters, arrivals and streams of chance
environment.py   a batch of users stepped together
gym.py           the same under gymnasium, one user an episode
behaviour.py     policies that a log comes from, with propensities
generate.py      simulate(...): a log in the schema of goal.log
oracle.py        the best that any policy can reach
plans.py         the best of those that ignore what users do
"""

from __future__ import annotations

from goal.simulator import oracle
from goal.simulator.behaviour import BEHAVIOURS, Behaviour, behaviour_policy
from goal.simulator.environment import Step, VectorEnvironment
from goal.simulator.generate import log_schema, simulate
from goal.simulator.gym import register_environments
from goal.simulator.oracle import Oracle
from goal.simulator.parameters import PRESETS, Parameters, load, preset
from goal.simulator.plans import Plan, best_plan
from goal.simulator.users import UserTypes, arrivals, draw_users, middle_user

__all__ = [
    "BEHAVIOURS",
    "PRESETS",
    "Behaviour",
    "Oracle",
    "Parameters",
    "Plan",
    "Step",
    "UserTypes",
    "VectorEnvironment",
    "arrivals",
    "behaviour_policy",
    "best_plan",
    "draw_users",
    "load",
    "log_schema",
    "middle_user",
    "oracle",
    "preset",
    "simulate",
]

register_environments()
