from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import ConfigurationError
from goal.log import FeatureScaling, InteractionLog

from .logs import logs, make_log


@settings(deadline=None, max_examples=25)
@given(logs, st.data())
def test_agrees_with_numpy_on_the_training_rows(log: InteractionLog, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, log.events - 1), min_size=1, unique=True)))
    scaling = FeatureScaling.fit(log, rows)
    for f in range(2):
        present = log.numeric[rows, f].astype(np.float64)
        present = present[~np.isnan(present)]
        if len(present):
            assert scaling.numeric_median[f] == pytest.approx(np.median(present), rel=1e-6)
            assert scaling.numeric_mean[f] == pytest.approx(present.mean(), rel=1e-6, abs=1e-12)
            assert scaling.numeric_std[f] == pytest.approx(present.std() if np.ptp(present) else 1.0, rel=1e-5)
    positive = log.incentives[rows][log.incentives[rows] > 0]
    assert scaling.incentive_scale == (np.median(positive) if len(positive) else 1.0)
    assert scaling.incentive_max == log.incentives[rows].max()
    for o in range(3):
        outcome = log.outcomes[rows, o]
        expected = outcome[outcome > 0].mean(dtype=np.float64) if (outcome > 0).any() else 1.0
        assert scaling.outcome_scale[o] == pytest.approx(expected, rel=1e-6)


def test_reads_nothing_but_the_training_rows() -> None:
    log = make_log()
    rows = np.arange(0, 60, 2)
    before = FeatureScaling.fit(log, rows)
    others = np.arange(1, 60, 2)
    for values in (log.numeric, log.incentives, log.revenue, log.objectives):
        values[others] = 1e6
    assert FeatureScaling.fit(log, rows) == before


def test_survives_json_exactly() -> None:
    scaling = FeatureScaling.fit(make_log(), np.arange(60))
    assert FeatureScaling.from_dict(json.loads(json.dumps(scaling.to_dict()))) == scaling
    with pytest.raises(ConfigurationError, match="scaling: keys"):
        FeatureScaling.from_dict({"numeric_mean": [0]})


def test_constant_and_absent_features() -> None:
    log = make_log()
    numeric = np.stack([np.full(60, 0.1), np.full(60, np.nan)], axis=1).astype(np.float32)
    scaling = FeatureScaling.fit(dataclasses.replace(log, numeric=numeric), np.arange(60))
    assert scaling.numeric_std == (1.0, 1.0)
    assert scaling.numeric_median == (pytest.approx(0.1), 0.0)


def test_needs_rows() -> None:
    with pytest.raises(ConfigurationError, match="at least one training row"):
        FeatureScaling.fit(make_log(), np.array([], dtype=int))
