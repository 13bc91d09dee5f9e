"""The predictors that the pretrained policy is compared with."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from goal.evaluation.held_out import _boosting
from goal.log import Windows
from goal.simulator import preset, simulate


@pytest.mark.parametrize(("most", "expected"), [(500, 500), (300, 250)])
def test_boosting_is_fitted_on_no_more_rows_than_said(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: int
) -> None:
    log = simulate(preset("calibrated"), users=5, seed=0)
    windows, fit, fitted = Windows(log, np.arange(log.events), length=2), HistGradientBoostingRegressor.fit, []
    monkeypatch.setattr(
        HistGradientBoostingRegressor, "fit", lambda self, x, y: (fitted.append(len(x)), fit(self, x, y))[1]
    )
    assert _boosting(windows, windows, most_rows=most).shape == (500,)
    assert fitted == [expected]
