"""One loop, and the stages that run in it: pretraining, P-Score, value, SCPO."""

from goal.training.loop import Loop, MetricsFile, Stage
from goal.training.pretraining import Pretraining
from goal.training.pscore import PScoreStage
from goal.training.scpo import Scpo
from goal.training.states import StateSampler
from goal.training.value import ValueStage

__all__ = ["Loop", "MetricsFile", "PScoreStage", "Pretraining", "Scpo", "Stage", "StateSampler", "ValueStage"]
