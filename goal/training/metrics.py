"""What the numbers in metrics.jsonl mean, for the report."""

from __future__ import annotations

EVERY_STAGE = {
    "gradient_norm": "length of the gradient before it is clipped",
    "learning_rate": "of the optimiser at that step",
    "step_seconds": "time of that step",
}
METRIC_HELP: dict[str, dict[str, str]] = {
    "pretraining": {
        **EVERY_STAGE,
        "loss": "weighted negative log-likelihood of the logged amounts' tokens",
        "accuracy": "share of the logged amounts whose every token had the largest logit, log omega still in it",
    },
    "pscore": {
        **EVERY_STAGE,
        "loss": "the objectives' losses, weighted by their learned uncertainty, and the last two beside them",
        "loss_revenue": "error of the revenue (cross-entropy of its bins and gamma deviance within them)",
        "loss_cost": "error of the cost, as of the revenue",
        "loss_fused": "squared error of the sum of the further objectives, each over its scale",
        "loss_later": "squared error of the revenue of the steps that follow, in logarithms",
        "loss_surprise": "squared error of what was to be expected of past outcomes, in logarithms",
    },
    "value": {
        **EVERY_STAGE,
        "loss": "squared errors of utility (times 1,000) and cost against the targets of fitted Q iteration, of all "
        "networks together",
        "fit_error": "root mean square error of the planned values, over their spread, at the worst multiplier",
        "utility_to_go": "mean target of revenue - multiplier * cost from the next event on, smallest multiplier",
        "utility_to_go_strict": "the same at the largest multiplier",
        "cost_to_go": "mean target of the cost from the next event on, smallest multiplier",
    },
    "scpo": {
        **EVERY_STAGE,
        "loss": "clipped surrogate with its KL",
        "utility": "expected revenue less multiplier times cost of the policy's amounts, now and later",
        "zero_variance_share": "groups whose candidates are all worth the same, which teach nothing",
        "kl": "divergence from the pretrained policy",
        "clip_fraction": "candidates whose ratio was clipped",
        "entropy": "of the policy: a mean over tokens, in the exact rollout of the amounts",
        "ratio_max": "largest probability ratio to the policy that took the candidates",
        "ratio_min": "smallest such ratio",
        "amount": "mean amount at each multiplier, the smallest palest",
    },
}
"""By stage and metric. A further objective's loss is `loss_` and its name."""


def family(metric: str) -> str:
    """Return the name under which a metric is drawn and explained: that of every multiplier is one."""
    return "amount" if metric.startswith("amount@") else metric


def explain(stage: str, metric: str) -> str | None:
    """Return the sentence of a metric, None where there is none."""
    known = METRIC_HELP.get(stage, {})
    metric = family(metric)
    if stage == "pscore" and metric.startswith("loss_"):
        return known.get(metric, f"error of {metric.removeprefix('loss_')}")
    return known.get(metric)
