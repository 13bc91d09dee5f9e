"""Off-policy evaluation: what another policy would earn and cost, from a log with propensities alone.

decisions.py            the input: logged decisions and the target's probabilities
estimate.py             the answer: estimates, intervals, abstentions
importance_sampling.py  self-normalised, by trajectory or by decision
marginalized.py         marginalised, over cells of states
fitted_q.py             fitted Q evaluation with a linear value
doubly_robust.py        both
support.py              whether the log speaks of what the target does
confounding.py          whether the log's amounts were explained by what also explains revenue
evidence.py             all of it for a policy and a log, as the report prints it
"""

from __future__ import annotations

from goal.evaluation.off_policy.confounding import Confounding, confounding, state_features
from goal.evaluation.off_policy.decisions import LoggedDecisions, nearest
from goal.evaluation.off_policy.doubly_robust import doubly_robust
from goal.evaluation.off_policy.estimate import Estimate, OffPolicyEstimates
from goal.evaluation.off_policy.evidence import log_evidence
from goal.evaluation.off_policy.fitted_q import fitted_q_evaluation
from goal.evaluation.off_policy.importance_sampling import self_normalized_importance_sampling
from goal.evaluation.off_policy.marginalized import aggregate, marginalized_importance_sampling
from goal.evaluation.off_policy.support import Support, amount_support, support

__all__ = [
    "Confounding",
    "Estimate",
    "LoggedDecisions",
    "OffPolicyEstimates",
    "Support",
    "aggregate",
    "amount_support",
    "confounding",
    "doubly_robust",
    "fitted_q_evaluation",
    "log_evidence",
    "marginalized_importance_sampling",
    "nearest",
    "self_normalized_importance_sampling",
    "state_features",
    "support",
]
