"""Incentive allocation under a return-on-investment target."""
