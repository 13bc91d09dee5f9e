from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import SchemaError
from goal.log import Objective, Schema

MINIMAL = {"user": "u", "time": "t", "incentive": "a", "revenue": "r"}
FULL = Schema(
    **MINIMAL,
    order="n",
    numeric=("n", "x"),
    categorical=("c",),
    cost="k",
    cost_rate=0.5,
    objectives=(Objective("click"), Objective("minutes", "amount")),
    multiplier="m",
    propensity="p",
    horizon=10,
    incentive_unit="coins",
    currency="euro",
)


@pytest.mark.parametrize("schema", [FULL, Schema(**MINIMAL)])
def test_survives_toml_and_dict(schema: Schema, tmp_path: Path) -> None:
    schema.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == schema
    assert Schema.from_dict(schema.to_dict()) == schema


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), min_size=1).filter(str.strip))
def test_any_column_name_survives_toml(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / "named.toml"
    schema = Schema(user=name, time=name + "t", incentive=name + "a", revenue=name + "r")
    schema.save(path)
    assert Schema.load(path) == schema


def test_columns_name_each_once() -> None:
    assert FULL.columns == ("u", "t", "n", "a", "r", "k", "m", "p", "click", "minutes", "x", "c")
    assert FULL.outcome_names == ("r", "click", "minutes")
    assert FULL.outcome_kinds == ("amount", "binary", "amount")


def test_rule_for_the_cost_of_an_amount_never_logged() -> None:
    assert Schema(**MINIMAL).known_cost_rate == 1.0
    assert Schema(**MINIMAL, cost_rate=2).known_cost_rate == 2.0
    assert Schema(**MINIMAL, cost="k").known_cost_rate is None
    assert FULL.known_cost_rate == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": ""}, "user is ''"),
        ({"user": 3}, "user is 3"),
        ({"numeric": "x"}, "numeric is 'x'; expected a list"),
        ({"numeric": ["x", 1]}, "numeric is 1"),
        ({"numeric": ["x", "x"]}, "'x' is both numeric and numeric"),
        ({"numeric": ["r"]}, "'r' is both revenue and a numeric feature. Features must be known before"),
        ({"categorical": ["u"]}, "'u' is both user and a categorical feature"),
        ({"cost": "r"}, "'r' is both revenue and cost"),
        ({"cost_rate": -1}, "cost_rate is -1; expected a finite positive number"),
        ({"cost_rate": "1"}, "cost_rate is '1'; expected a number"),
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": True}, "horizon is True"),
        ({"clock": "x"}, "clock is 'x'"),
        ({"objectives": {"name": "click"}}, "expected a list of objectives"),
        ({"objectives": [{"nam": "click"}]}, "expected the keys name and kind"),
        ({"objectives": [{"name": "click", "kind": "rate"}]}, "kind is 'rate'; expected 'binary'"),
        ({"objectives": ["click"]}, "objective 'click'"),
        ({"catgorical": ["c"]}, "unknown key 'catgorical'. Did you mean 'categorical'?"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.from_dict({**MINIMAL, **changes})
    assert message in str(caught.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(SchemaError, match="time, revenue missing"):
        Schema.from_dict({"user": "u", "incentive": "a"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("user = oops", "not a TOML file: Invalid value (at line 1, column 8)"), ("users = 'u'", "Did you mean 'user'?")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SchemaError) as caught:
        Schema.load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"absent.toml: cannot read the schema: No such file"):
        Schema.load(tmp_path / "absent.toml")


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.user = "v"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["revenue", "cost", "fused", "later", "surprise"])
def test_names_that_losses_use_are_no_objectives(name: str) -> None:
    with pytest.raises(SchemaError, match=f"objective '{name}': the name is taken"):
        Objective(name)
