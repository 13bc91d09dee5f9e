"""Multipliers: which ones to train on, and which one meets a return-on-investment target."""

from __future__ import annotations

from goal.constraint.calibration import Calibration, Evaluation, calibrate
from goal.constraint.candidates import candidates, threshold, without_rises

__all__ = ["Calibration", "Evaluation", "calibrate", "candidates", "threshold", "without_rises"]
