"""Evaluation: measures, rollouts in the simulator, sweeps over multipliers and the report.

metrics/      REV, ROI, incremental ROI, ROI violation rate, share of gain, regret
off_policy/   what another policy would earn, from a log alone
policies.py   policies to compare with
rollout.py    a policy in a simulated environment
sweep.py      one policy over many multipliers, beside the oracle
ledger.py     what the learned value loses, and what the policy made from it
experts.py    which experts a policy uses at which multiplier
violations.py the oracle's ROI violation rate at a policy's average ROI
report.py     one HTML file and PNG plots (plots.py); imported on its own, since it needs matplotlib
"""

from __future__ import annotations

from goal.evaluation import metrics, off_policy
from goal.evaluation.experts import ExpertUsage, expert_usage
from goal.evaluation.ledger import ValueGreedy, ledger, promises
from goal.evaluation.policies import Allocator, Constant, OraclePolicy, PrivilegedPolicy, Uniform
from goal.evaluation.rollout import Rollout, Stream, expected_revenue, rollout, rollout_many
from goal.evaluation.sweep import (
    Sweep,
    amount_distribution,
    behaviour_points,
    constant_points,
    of_first_users,
    oracle_frontier,
    sweep,
)
from goal.evaluation.violations import oracle_violation_rate

__all__ = [
    "Allocator",
    "Constant",
    "ExpertUsage",
    "OraclePolicy",
    "PrivilegedPolicy",
    "Rollout",
    "Stream",
    "Sweep",
    "Uniform",
    "ValueGreedy",
    "amount_distribution",
    "behaviour_points",
    "constant_points",
    "expected_revenue",
    "expert_usage",
    "ledger",
    "metrics",
    "of_first_users",
    "off_policy",
    "oracle_frontier",
    "oracle_violation_rate",
    "promises",
    "rollout",
    "rollout_many",
    "sweep",
]
