"""The policy network: encoder, decoder, the rules of its amounts, and generation."""

from goal.model.generation import Generation
from goal.model.policy import Policy

__all__ = ["Generation", "Policy"]
