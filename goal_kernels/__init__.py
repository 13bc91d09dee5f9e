"""Fused operations behind `goal`."""
