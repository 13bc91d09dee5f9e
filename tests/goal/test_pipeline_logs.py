"""Whole small runs on logs read from files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from goal import Policy, results
from goal.config import VocabularyConfig
from goal.errors import ConfigurationError
from goal.log import Schema, read, write
from goal.pipeline import Run
from goal.shapes import policy_config
from goal.simulator import preset, simulate
from goal.tokenizer import IncentiveTokenizer
from goal.training import Pretraining

from .tiny import TINY


@pytest.mark.parametrize("listed", [True, False])
def test_a_real_log(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not listed:
        monkeypatch.setattr("goal.data.MOST_LISTED_AMOUNTS", 0)
    log = simulate(preset("population"), "uniform", users=60, seed=3)
    log.schema.save(tmp_path / "log.toml")
    write(log, tmp_path / "log.parquet")
    assert read(tmp_path / "log.parquet", log.schema).events == 6000
    config = dataclasses.replace(
        TINY, environment=None, log=str(tmp_path / "log.parquet"), schema=str(tmp_path / "log.toml")
    )
    summary = Run(config, tmp_path / "run").run()
    assert summary["estimate"] is True and summary["sweep"][0]["oracle_value"] is None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "estimate" in page and "last amount" in page
    for printed in (
        "How the same policy spends at each multiplier.",
        *("self normalized importance", "marginalized importance", "doubly robust", "fitted q", "effective size"),
    ):
        assert printed in page, printed
    amounts = json.loads((tmp_path / "run" / "evaluation.json").read_text())["amounts"]
    assert amounts["multipliers"] == [row["multiplier"] for row in summary["sweep"]] and amounts["amounts"][0] == "0"
    assert np.shape(amounts["share"]) == (len(amounts["multipliers"]), len(amounts["amounts"]))
    np.testing.assert_allclose(np.sum(amounts["share"], axis=1), 1)
    assert "reward model's word" in json.loads((tmp_path / "run" / "calibration.json").read_text())["message"]


def test_a_run_may_lie_in_the_folder_of_its_log_and_notices_another_file(tmp_path: Path) -> None:
    log = simulate(preset("calibrated"), "uniform", users=30, seed=3)
    log.schema.save(tmp_path / "log.toml")
    (tmp_path / "log").mkdir()
    write(log, tmp_path / "log" / "part.parquet")
    config = dataclasses.replace(TINY, environment=None, log=str(tmp_path / "log"), schema=str(tmp_path / "log.toml"))
    Run(config, tmp_path / "log" / "run").run(until="vocabulary")
    Run(config, tmp_path / "log" / "run").run(until="pretraining")
    write(log, tmp_path / "log" / "more.parquet")
    with pytest.raises(ConfigurationError, match="log has changed since the run"):
        Run(config, tmp_path / "log" / "run")


def test_paying_as_the_log_did_is_estimated_to_bring_what_it_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Luck included: a bound over users that only counted expectations would be too narrow."""
    log = simulate(preset("population"), "uniform", users=60, seed=3)
    log.schema.save(tmp_path / "log.toml")
    write(log, tmp_path / "log.parquet")
    config = dataclasses.replace(
        TINY, environment=None, log=str(tmp_path / "log.parquet"), schema=str(tmp_path / "log.toml")
    )
    run = Run(config, tmp_path / "run")
    run.run("reward")
    windows = run.data.windows(run.data.splits.calibration, 1)
    rows = windows.rows
    monkeypatch.setattr("goal.results.estimates.allocate", lambda *_: run.data.log.incentives[rows])
    evaluate, never = results.estimated_per_user(run.reward, run.policy("pretrained"), run.data)
    revenue, cost = evaluate(1.0)
    users, index = np.unique(run.data.log.user_index[rows], return_inverse=True)
    scale = len(rows) / len(users)
    np.testing.assert_allclose(revenue, np.bincount(index, run.data.log.revenue[rows]) / scale, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(cost, np.bincount(index, run.data.log.cost[rows]) / scale, rtol=1e-6, atol=1e-6)
    assert np.corrcoef(never, revenue)[0, 1] > 0.5, "luck is the same whatever is paid"


def test_a_log_of_a_shop(tmp_path: Path) -> None:
    """No clock, no horizon, a fitted cost, amounts in cents, categories and missing numbers; a category comes late."""
    rng = np.random.default_rng(0)
    users, visits = 40, 30
    size = users * visits
    amount = np.where(rng.random(size) < 0.3, 0.0, np.round(rng.lognormal(0.5, 0.8, size), 2))
    last = np.tile(np.arange(visits), users) >= visits - 4
    table = pa.table({
        "user": np.repeat(np.arange(users), visits),
        "day": np.tile(np.arange(visits), users),
        "coupon": amount,
        "sales": rng.gamma(2.0, 3.0 + amount),
        "margin_lost": 0.4 * amount,
        "basket": np.where(rng.random(size) < 0.1, np.nan, rng.normal(size=size)),
        "country": np.where(last, "zz", rng.choice(["at", "de"], size)),
        "came_back": rng.integers(0, 2, size),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "shop.parquet")
    (tmp_path / "shop.toml").write_text(
        'user = "user"\ntime = "day"\nincentive = "coupon"\nrevenue = "sales"\ncost = "margin_lost"\n'
        'numeric = ["basket"]\ncategorical = ["country"]\n[[objectives]]\nname = "came_back"\nkind = "binary"\n'
    )
    config = dataclasses.replace(
        TINY, environment=None, log=str(tmp_path / "shop.parquet"), schema=str(tmp_path / "shop.toml"), roi_target=2.0,
        vocabulary=VocabularyConfig(min_unit=0.01),
        network=dataclasses.replace(TINY.network, window=40),  # more than any user has
    )  # fmt: skip
    for horizon in ("immediate", "long"):
        reward = dataclasses.replace(TINY.reward, horizon=horizon, fusion_weight=0.5)
        run = Run(dataclasses.replace(config, reward=reward), tmp_path / horizon)
        summary = run.run()
        assert summary["estimate"] is True and np.isfinite([row["rev"] for row in summary["sweep"]]).all()
        json.loads((tmp_path / horizon / "evaluation.json").read_text(), parse_constant=pytest.fail)
    policy = Policy.from_pretrained(tmp_path / "long" / "policy")
    assert policy.config.categories == (("at", "de"),)  # "zz" is in no training row
    one = table.filter(pc.equal(table["country"], "de"))
    pq.write_table(one, tmp_path / "one.parquet")
    log = read(tmp_path / "one.parquet", Schema.load(tmp_path / "shop.toml"), categories=policy.config.categories)
    assert set(log.categorical[:, 0].tolist()) == {2}


def test_amounts_that_the_vocabulary_cannot_write_are_not_offered(tmp_path: Path) -> None:
    log = simulate(preset("calibrated"), "uniform", users=30, seed=3)
    halves = dataclasses.replace(log, incentives=log.incentives / 2, cost=log.cost / 2)
    halves.schema.save(tmp_path / "log.toml")
    write(halves, tmp_path / "log.parquet")
    config = dataclasses.replace(
        TINY, environment=None, log=str(tmp_path / "log.parquet"), schema=str(tmp_path / "log.toml")
    )
    run = Run(config, tmp_path / "run")
    run.run(until="vocabulary")  # its smallest unit is 1
    allowed = run.policy_config.allowed_amounts
    assert allowed is not None and 0.5 not in allowed and {0.0, 1.0, 5.0} <= set(allowed)
    assert run.tokenizer.decode(run.tokenizer.encode(allowed)).tolist() == list(allowed)
    with pytest.raises(ConfigurationError, match=r"allowed_amounts: 0\.5 cannot be written"):
        Policy(dataclasses.replace(run.policy_config, allowed_amounts=(0.0, 0.5)))
    run.run(until="scpo")


def test_no_amount_is_offered_that_nobody_logged(tmp_path: Path) -> None:
    log = simulate(preset("calibrated"), "uniform", users=30, seed=3)
    write(dataclasses.replace(log, incentives=log.incentives * 1.5, cost=log.cost * 1.5), tmp_path / "log.parquet")
    log.schema.save(tmp_path / "log.toml")
    config = dataclasses.replace(
        TINY, environment=None, log=str(tmp_path / "log.parquet"), schema=str(tmp_path / "log.toml"),
        vocabulary=VocabularyConfig(max_tokens=2),
    )  # fmt: skip
    said: list[str] = []
    run = Run(config, tmp_path / "run", announce=said.append)
    run.run(until="vocabulary")  # 15 and 1, so that 1.5 would be written as 1
    assert run.policy_config.allowed_amounts == (0.0, 3.0, 6.0, 9.0, 12.0, 15.0)
    assert any("5 of 11 logged amounts, such as 1.5, cannot be written in units of 1" in line for line in said)
    windows = run.data.windows(run.data.splits.training, 4)
    policy = Policy(run.policy_config, run.data.scaling)
    taught = Pretraining(policy, windows, run.tokenizer, config.pretraining, (0.0,))
    amounts = run.tokenizer.decode(taught.tokens).numpy()
    np.testing.assert_array_equal(amounts, run.data.log.incentives[taught.windows.rows])
    assert set(amounts) == set(run.policy_config.allowed_amounts) and len(amounts) < len(windows)
    coarse = IncentiveTokenizer([100.0, 60.0])
    with pytest.raises(ConfigurationError, match=r"vocabulary: writes none of the amounts .*1\.5.* below 60"):
        policy_config(config, run.data, coarse)
