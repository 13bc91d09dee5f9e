"""The oracle's violation rate at a given average ROI."""

from __future__ import annotations

import pytest

from goal.evaluation import OraclePolicy, oracle_violation_rate, sweep
from goal.simulator import preset
from goal.simulator.oracle import solve

PARAMETERS = preset("calibrated")
COMMON = {"users": 1000, "seed": 3, "window": 1000, "stride": 250}


def test_at_the_roi_of_a_plan_it_is_that_plans() -> None:
    swept = sweep(OraclePolicy(), PARAMETERS, [2.0, 2.5], roi_target=3.0, oracle=False, **COMMON)
    for row in swept.rows:
        multiplier = row["multiplier"]
        assert multiplier is not None
        rate = oracle_violation_rate(PARAMETERS, solve(PARAMETERS, multiplier).roi, target=3.0, **COMMON)
        assert rate == pytest.approx(row["rvr"], abs=0.01)


def test_it_falls_as_the_roi_rises() -> None:
    rates = [oracle_violation_rate(PARAMETERS, roi, target=3.0, **COMMON) for roi in (2.7, 3.0, 3.3, 4.0)]
    assert all(rate is not None for rate in rates)
    assert rates == sorted(rates, key=lambda rate: -(rate or 0))
    assert rates[1] == pytest.approx(0.5, abs=0.1)  # half of the windows lie below their mean
    assert rates[3] == 0


def test_no_oracle_has_a_roi_out_of_reach() -> None:
    assert oracle_violation_rate(PARAMETERS, 0.5, target=3.0, **COMMON) is None
