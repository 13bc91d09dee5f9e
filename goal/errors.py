"""Errors that a user of the package can cause, each naming the culprit and the remedy."""

from __future__ import annotations


class GoalError(Exception):
    """Base of every error that the package raises on purpose."""


class ConfigurationError(GoalError, ValueError):
    """A setting has a value that cannot work."""


class SchemaError(GoalError, ValueError):
    """A schema is malformed, or names columns that the log does not have."""


class LogError(GoalError, ValueError):
    """The rows of an interaction log break a rule; the message names column, row and value."""
