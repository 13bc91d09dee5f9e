"""One loop, and the stages that run in it: pretraining, P-Score, value, SCPO."""

from goal.training.loop import Loop, MetricsFile
from goal.training.pretraining import Pretraining
from goal.training.reward import PScoreStage, ValueStage
from goal.training.scpo import Scpo
from goal.training.states import StateSampler

__all__ = ["Loop", "MetricsFile", "PScoreStage", "Pretraining", "Scpo", "StateSampler", "ValueStage"]
