"""Presets, validation and TOML files of the environments' parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.simulator import PRESETS, Parameters, load, preset

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "environment.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "environment.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_paper_preset_is_the_paper() -> None:
    paper = preset("paper")
    assert (paper.max_level, paper.horizon) == (10, 100)
    assert (paper.alpha, paper.beta, paper.rho, paper.eta, paper.base_logit) == (0.8, 1.2, 0.9, 0.5, 0.0)
    np.testing.assert_array_equal(paper.levels, np.arange(11))
    np.testing.assert_array_equal(paper.cost(paper.levels), paper.levels)
    np.testing.assert_array_equal(paper.g(paper.levels), paper.levels)
    assert paper.numeric_names == ("fatigue", "previous_engagement", "progress")


def test_the_calibrated_preset_differs_from_the_paper_in_three_numbers() -> None:
    paper, calibrated = preset("paper").to_dict(), preset("calibrated").to_dict()
    changed = {name: value for name, value in calibrated.items() if paper[name] != value}
    assert changed == {"base_logit": -3.0, "eta": 0.05, "revenue_per_engagement": 30.0}


def test_the_population_preset_has_thirty_coin_levels() -> None:
    population = preset("population")
    assert len(population.levels) == 30
    np.testing.assert_array_equal(population.levels[:10], [0, 1, 2, 3, 4, 5, 6, 8, 11, 14])
    assert population.levels[-1] == 3000
    np.testing.assert_allclose(population.level_responses, np.log(1 + population.levels / 30))
    np.testing.assert_allclose(population.cost(population.levels), 0.01 * population.levels)
    assert population.numeric_names == ("previous_engagement", "progress")


def test_expected_revenue_is_the_paper_formula() -> None:
    calibrated = preset("calibrated")
    expected = 30 / (1 + np.exp(-(-3 + 0.8 * 4 - 1.2 * 0.7)))
    assert calibrated.expected_revenue(4, 0.7) == pytest.approx(expected, rel=1e-12)
    assert calibrated.expected_revenue(calibrated.levels, 0.0).shape == (11,)


def test_amounts_snap_to_the_nearest_level_and_ties_pay_less() -> None:
    calibrated, population = preset("calibrated"), preset("population")
    np.testing.assert_array_equal(calibrated.nearest([0.4, 0.5, 0.51, 1.5, 9.7, 400.0]), [0, 0, 1, 1, 10, 10])
    np.testing.assert_array_equal(population.levels[population.nearest([7.0, 7.1, 2650.0])], [6, 8, 3000])
    amounts = np.random.default_rng(0).uniform(0, 3500, 1000)
    distance = np.abs(amounts[:, None] - population.levels)
    np.testing.assert_array_equal(population.nearest(amounts), distance.argmin(1))


@pytest.mark.parametrize("amount", [-1.0, np.nan, np.inf])
def test_an_impossible_amount_is_named(amount: float) -> None:
    with pytest.raises(ConfigurationError, match=f"amounts must be finite and not negative, got {amount}"):
        preset("paper").nearest([1.0, amount])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("alpha", -0.1, "alpha must be at least 0, got -0.1"),
        ("eta", float("nan"), "eta must be a finite number, got nan"),
        ("rho", 1.0, "rho - rho_spread and rho \\+ rho_spread must lie in \\[0, 1\\), got rho = 1.0"),
        ("rho_spread", 0.2, "got rho = 0.9 and rho_spread = 0.2"),
        ("horizon", 0, "horizon must be at least 1, got 0"),
        ("horizon", 2.5, "horizon must be a whole number, got 2.5"),
        ("horizon", True, "horizon must be a whole number, got True"),
        ("max_level", "ten", "max_level must be a whole number, got 'ten'"),
        ("cost_rate", 0.0, "cost_rate must be above 0, got 0.0"),
        ("response", "square", "response must be one of linear, log, got 'square'"),
        ("hidden_fatigue", 1, "hidden_fatigue must be true or false, got 1"),
        ("incentive_unit", 3, "incentive_unit must be a text, got 3"),
        ("spacing_points", 1, "spacing_points must be at least 2, got 1"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(preset("calibrated"), **{field: value})


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match="'papers': choose one of paper, calibrated, population"):
        preset("papers")


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_survive_json(name: str) -> None:
    parameters = preset(name)
    assert Parameters(**json.loads(json.dumps(parameters.to_dict()))) == parameters
    assert load(name) is parameters


def test_parameters_and_their_grids_cannot_change() -> None:
    calibrated = preset("calibrated")
    with pytest.raises(dataclasses.FrozenInstanceError):
        calibrated.alpha = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        calibrated.levels[0] = 1.0


def test_integers_and_numpy_numbers_are_the_same_parameters() -> None:
    assert dataclasses.replace(preset("paper"), base_logit=0, horizon=np.int64(100)) == preset("paper")


def test_a_file_overrides_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "population"\n[parameters]\neta = 0.2\nbase_logit = -2\n')
    assert load(path) == dataclasses.replace(preset("population"), eta=0.2, base_logit=-2.0)
    assert load(str(path)) == load(path)


def test_a_file_may_give_everything_itself(tmp_path: Path) -> None:
    required = {"base_logit": 0, "alpha": 0.8, "beta": 1.2, "rho": 0.9, "eta": 0.5, "revenue_per_engagement": 1}
    lines = [f"{name} = {value}" for name, value in (required | {"max_level": 10, "horizon": 100}).items()]
    assert load(write(tmp_path, "\n".join(["[parameters]", *lines]))) == preset("paper")


def test_the_example_file_is_an_environment() -> None:
    example = load(EXAMPLE)
    assert example != preset("calibrated")
    assert example.horizon == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset = 'calibrated'\n[parameter]\n", "unknown key 'parameter': did you mean 'parameters'"),
        ("preset = 'calibrated'\n[parameters]\nbeto = 1\n", "unknown parameter 'beto': did you mean 'beta'"),
        ("preset = 'calibrated'\nparameters = 3\n", "'parameters' must be a table, got 3"),
        ("preset = 'other'\n", "no environment preset 'other'"),
        ("[parameters]\nalpha = 1.0\n", "lacks base_logit, beta, rho, eta"),
        ("preset = 'calibrated'\n[parameters]\nalpha = -1.0\n", "environment.toml: alpha must be at least 0"),
        ("preset = ", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(write(tmp_path, text))


def test_a_missing_file_lists_the_presets() -> None:
    with pytest.raises(ConfigurationError, match="'calibratd' is neither a preset"):
        load("calibratd")
