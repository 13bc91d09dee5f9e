"""The interaction log: schema, reading and writing, splits, windows and scales."""

from goal.log.history import History
from goal.log.interaction_log import InteractionLog
from goal.log.reading import read, write
from goal.log.scaling import FeatureScaling
from goal.log.schema import Objective, Schema
from goal.log.splits import Splits, split_by_time, split_by_user
from goal.log.windows import Successors, Targets, Windows, thinned

__all__ = [
    "FeatureScaling",
    "History",
    "InteractionLog",
    "Objective",
    "Schema",
    "Splits",
    "Successors",
    "Targets",
    "Windows",
    "read",
    "split_by_time",
    "split_by_user",
    "thinned",
    "write",
]
