"""What a finished policy is worth: calibration, evaluation and report of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goal.model import Policy
from goal.results.estimates import estimated_per_user
from goal.results.logged import evaluate_log
from goal.results.simulated import evaluate_simulated, simulated_per_user
from goal.results.summary import write_report

if TYPE_CHECKING:
    from goal.pipeline import Run

__all__ = ["estimated_per_user", "evaluate", "simulated_per_user", "write_report"]


def evaluate(run: Run, policy: Policy) -> dict[str, Any]:
    """The artefacts that come from evaluation: headline, sweep and what belongs to them."""
    if run.data.parameters is None:
        return evaluate_log(run, policy)
    return evaluate_simulated(run, policy, run.data.parameters)
