"""What a payment brings: P-Score (now) and long-horizon value (later), joined in one reward model."""

from goal.reward.model import RewardModel, RewardTable
from goal.reward.planned import PlannedValue
from goal.reward.pscore import PScore
from goal.reward.value import LongHorizonValue

__all__ = ["LongHorizonValue", "PScore", "PlannedValue", "RewardModel", "RewardTable"]
