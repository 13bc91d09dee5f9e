"""One loop, the stages that run in it (pretraining, P-Score, value, SCPO), and planning, which needs none."""

from goal.training.loop import Loop, MetricsFile, Stage
from goal.training.planning import plan
from goal.training.pretraining import Pretraining
from goal.training.pscore import PScoreStage
from goal.training.scpo import Scpo
from goal.training.states import StateSampler
from goal.training.transitions import Transitions
from goal.training.value import ValueStage

__all__ = [
    "Loop",
    "MetricsFile",
    "PScoreStage",
    "Pretraining",
    "Scpo",
    "Stage",
    "StateSampler",
    "Transitions",
    "ValueStage",
    "plan",
]
