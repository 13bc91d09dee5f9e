"""A whole run, small: what it leaves, and what a killed one ends with."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from goal import Policy, results
from goal.config import (
    ConstraintConfig,
    EvaluationConfig,
    LoopConfig,
    NetworkConfig,
    PretrainingConfig,
    RewardConfig,
    RunConfig,
    ScpoConfig,
    VocabularyConfig,
)
from goal.data import Data
from goal.errors import ConfigurationError
from goal.log import Schema, read, write
from goal.pipeline import STAGES, Run
from goal.serialization import dumps, from_dict
from goal.shapes import policy_config
from goal.simulator import preset, simulate
from goal.tokenizer import IncentiveTokenizer
from goal.training import Pretraining
from goal.training.metrics import explain

pytestmark = pytest.mark.xdist_group("run")  # one worker makes the finished run for all of them


def loop(steps: int, batch: int) -> LoopConfig:
    return LoopConfig(steps=steps, batch_size=batch, warmup_steps=1, log_every=1, checkpoint_seconds=0.0)


TINY = RunConfig(
    simulated_users=30,
    threads=1,
    device="cpu",
    network=NetworkConfig(window=4, dimension=16, feedforward=16, expert_hidden=8, dilations=(1, 2)),
    pretraining=PretrainingConfig(loop=loop(4, 32)),
    reward=RewardConfig(dimension=16, value_dimension=16, grid_size=8, pscore=loop(4, 64), value=loop(4, 64)),
    scpo=ScpoConfig(loop=loop(3, 32)),
    constraint=ConstraintConfig(users=10, fine_step=0.2),
    evaluation=EvaluationConfig(users=12, rvr_window=100, rvr_stride=25),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Run(TINY, folder).run()
    return folder


def test_it_leaves_what_the_contract_says(finished: Path) -> None:
    for name in ("config.json", "vocabulary.json", "metrics.jsonl", "report.html", "summary.json"):
        assert (finished / name).stat().st_size > 0
    assert list((finished / "plots").glob("*.png"))
    rows = json.loads((finished / "evaluation.json").read_text())["diagnostics"]["promises"]
    assert [row["step"] for row in rows[::3]] == [0, 1, 2, 3, 4]
    assert len({row["expected_value"] for row in rows}) == len(rows)
    assert (finished / "plots" / "promises.png").stat().st_size > 0
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) >= {
        "roi_target", "multiplier", "rev", "cost", "roi", "rvr", "sweep", "wall_seconds", "device", "versions",
    }  # fmt: skip
    assert [row["multiplier"] for row in summary["sweep"]] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    for row in summary["sweep"]:
        assert set(row) == {"multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value"}
        assert row["value"] == pytest.approx(row["rev"] - row["multiplier"] * row["cost"])
        assert row["value"] <= row["oracle_value"] + 0.5 and row["reference_value"] <= row["oracle_value"] + 1e-9
    assert isinstance(Policy.from_pretrained(finished / "policy"), Policy)
    stages = {line["stage"] for line in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())}
    assert stages == {"pretraining", "pscore", "value", "scpo"}


def test_a_finished_run_is_not_run_again(finished: Path) -> None:
    before = (finished / "summary.json").stat().st_mtime_ns
    Run(TINY, finished).run()
    assert (finished / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("stopped_in", ["pretraining", "pscore", "value", "scpo", "calibration"])
def test_a_run_that_stopped_ends_with_the_same_result(
    stopped_in: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    with monkeypatch.context() as patch:
        if stopped_in == "calibration":

            def stop(run: Run) -> None:
                raise Stopped

            patch.setattr(Run, stopped_in, stop)
        else:
            from goal.training import Loop

            save = Loop._save

            def save_and_stop(self: Loop, stage, optimiser, generator, step: int) -> None:
                save(self, stage, optimiser, generator, step)
                if stage.name == stopped_in and step == 2:
                    raise Stopped

            patch.setattr(Loop, "_save", save_and_stop)
        with pytest.raises(Stopped):
            Run(TINY, tmp_path).run()
    Run(TINY, tmp_path).run(until="evaluation")
    whole, resumed = (load_file(folder / "policy" / "model.safetensors") for folder in (finished, tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    for name in ("calibration.json", "evaluation.json"):
        assert (finished / name).read_text() == (tmp_path / name).read_text()


def test_a_process_that_was_killed_in_training_ends_with_the_same_policy(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "policy")
    checkpoint = tmp_path / "checkpoints" / "scpo.checkpoint"
    checkpoint.unlink()
    ended = json.loads((tmp_path / "stages.json").read_text())
    (tmp_path / "stages.json").write_text(json.dumps({stage: ended[stage] for stage in STAGES[:3]}))
    script = (
        "import sys, time; from goal.pipeline import Run; from goal.training import Loop; save = Loop._save;"
        "Loop._save = lambda *arguments: (save(*arguments), time.sleep(0.5));"
        "Run.open(sys.argv[1]).run(until='scpo')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (
        torch.load(checkpoint, weights_only=True)["step"] < TINY.scpo.loop.steps and not (tmp_path / "policy").exists()
    )
    Run.open(tmp_path).run(until="scpo")
    whole, resumed = (load_file(folder / "policy" / "model.safetensors") for folder in (finished, tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["stage"] == "scpo"] == list(range(TINY.scpo.loop.steps))


def test_other_settings_in_the_same_folder_are_refused(finished: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"roi_target=3\.0, this one has 2\.5"):
        Run(dataclasses.replace(TINY, roi_target=2.5), finished)


def test_a_reward_model_without_snapshots_is_evaluated_all_the_same(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    for path in (tmp_path / "run" / "reward").glob("value-*.safetensors"):
        path.unlink()
    run = Run.open(tmp_path / "run")
    run.run_stage("evaluation", again=True)
    rows = run.read("evaluation.json")["diagnostics"]["promises"]
    assert {row["step"] for row in rows} == {TINY.reward.value.steps}
    run.run_stage("report")


def test_only_what_is_measured_may_change_later(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    settings = dataclasses.replace(TINY.evaluation, users=15, rvr_window=5000, rvr_stride=None)
    run = Run(dataclasses.replace(TINY, evaluation=settings), folder)
    assert "calibration" in run.seconds and "evaluation" not in run.seconds
    run.run()
    headline = run.read("evaluation.json")["headline"]
    assert (headline["users"], headline["window"], headline["stride"]) == (15, 1500, 375)  # one window, all there is


def test_a_folder_where_nothing_has_ended_takes_other_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Run(dataclasses.replace(TINY, environment="paradise"), tmp_path).run()
    Run(TINY, tmp_path).run(until="vocabulary")


def test_a_stage_asks_for_the_ones_before_it(tmp_path: Path) -> None:
    run = Run(TINY, tmp_path)
    with pytest.raises(ConfigurationError, match="'vocabulary' has not ended"):
        run.run_stage("scpo")
    with pytest.raises(ConfigurationError, match="not found"):
        Run.open(tmp_path / "nothing")


@pytest.mark.parametrize("listed", [True, False])
def test_no_more_than_the_maximum_amount_is_paid(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not listed:
        monkeypatch.setattr("goal.data.MOST_LISTED_AMOUNTS", 0)
    run = Run(dataclasses.replace(TINY, maximum_amount=3.5), tmp_path)
    run.run("scpo")
    assert run.data.log.incentives.max() == 10, "the log may hold more"
    policy, history = run.policy("policy"), run.data.windows(run.data.splits.training[::7], 4).batch(np.arange(40))
    assert (policy.config.allowed_amounts is not None) is listed
    drawn = policy.generate(history, torch.zeros(40), samples=50, greedy=False).amounts
    assert 0 < float(drawn.max()) <= 3.5 and float(run.reward.grid.max()) == 3
    with pytest.raises(ConfigurationError, match=r"maximum_amount=0\.5: the smallest amount of the log is 1"):
        Run(dataclasses.replace(TINY, maximum_amount=0.5), tmp_path / "none").run("pretraining")
    with pytest.raises(ConfigurationError, match="maximum_amount=0: expected None or positive and finite"):
        dataclasses.replace(TINY, maximum_amount=0)


def test_every_metric_is_explained(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    names = {(line["stage"], name) for line in lines for name in line if name not in ("stage", "step")}
    assert {stage for stage, _ in names} == {"pretraining", "pscore", "value", "scpo"}
    assert [pair for pair in sorted(names) if explain(*pair) is None] == []


def test_a_real_log(tmp_path: Path) -> None:
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
    assert "reward model's word" in json.loads((tmp_path / "run" / "calibration.json").read_text())["message"]


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
    monkeypatch.setattr("goal.results.allocate", lambda *_: run.data.log.incentives[rows])
    evaluate, never = results.estimated_per_user(run, run.policy("pretrained"))
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


def test_configuration_survives_json() -> None:
    assert from_dict(RunConfig, json.loads(dumps(TINY))) == TINY
    with pytest.raises(ConfigurationError, match="unknown setting 'scop'"):
        from_dict(RunConfig, {"scop": {}})


@pytest.mark.parametrize(("most", "read"), [(3000, 3000), (2000, 1500)])
def test_candidates_are_found_on_no_more_states_than_said(
    finished: Path, monkeypatch: pytest.MonkeyPatch, most: int, read: int
) -> None:
    run, rows = Run.open(finished), []
    windows = Data.windows
    monkeypatch.setattr("goal.pipeline.MOST_STATES", most)
    monkeypatch.setattr(
        Data, "windows", lambda self, given, length: (rows.append(len(given)), windows(self, given, length))[1]
    )
    run._candidates(run.reward)
    assert rows == [read]


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    Run(TINY, tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_text()
    path.write_text(whole[:40])
    for start in (lambda: Run.open(tmp_path), lambda: Run(TINY, tmp_path)):
        with pytest.raises(ConfigurationError, match=r"config\.json: not JSON: .*; mend it"):
            start()
    for change, message in (
        ({"seed": "0"}, "RunConfig: seed='0': a str came; expected int"),
        ({"scpo": 3}, "RunConfig: scpo=3: a int came; expected ScpoConfig"),
        ({"pretraining": {"loop": {"steps": 3}}}, "LoopConfig: the setting 'batch_size' is missing"),
        ({"roi_target": -1}, "roi_target=-1: expected positive"),
    ):
        path.write_text(json.dumps({**json.loads(whole), **change}))
        with pytest.raises(ConfigurationError, match=rf"config\.json: {message}.*; mend it"):
            Run.open(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config\.json: holds a list; expected a JSON object"):
        Run.open(tmp_path)
    path.write_text(whole)
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"stages\.json: not JSON: .*; delete .*stages\.json"):
        Run.open(tmp_path).run_stage("vocabulary")
    with pytest.raises(ConfigurationError, match=r"evaluation\.json: not found; delete .*stages\.json"):
        Run.open(tmp_path).read("evaluation.json")


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"confidence=2\.0: expected None or in \(0\.5, 1\)"):
        ConstraintConfig(confidence=2.0)
    with pytest.raises(ConfigurationError, match="users=0: expected None or at least 1"):
        EvaluationConfig(users=0)


def test_stages_are_in_order() -> None:
    assert STAGES == ("vocabulary", "pretraining", "reward", "scpo", "calibration", "evaluation", "report")
