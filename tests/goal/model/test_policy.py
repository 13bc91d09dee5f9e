"""What any policy must do, whatever its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from goal import History, Policy, PolicyConfig
from goal.errors import ConfigurationError
from goal.tokenizer import PAD, SOS

Make = Callable[..., Policy]
MakeHistory = Callable[..., History]


def with_sos(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(tokens[:, :1], SOS), tokens[:, :-1]], dim=1)


def test_an_event_never_changes_what_stands_before_it(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history(full=True)
    multiplier = torch.full((6,), 1.5)

    def encode(changed: History) -> torch.Tensor:
        states = policy.causal_states(changed)
        return policy.encoder(states, policy.encoder.embed_multiplier(multiplier))

    before = encode(history)
    for place in range(1, history.window - 1):
        changed = dataclasses.replace(history, incentives=history.incentives.clone(), numeric=history.numeric.clone())
        changed.incentives[:, place] += 5
        changed.numeric[:, place] -= 1
        after = encode(changed)
        assert torch.equal(after[:, : place + 1], before[:, : place + 1])  # the multiplier's token stands first
        assert not torch.allclose(after[:, place + 1 :], before[:, place + 1 :])


def test_decoder_is_causal(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history()
    multiplier = torch.ones(6)
    tokens = torch.tensor([[SOS, 4, 5, 6]] * 6)
    changed = tokens.clone()
    changed[:, 3] = 5
    logits, other = policy(history, multiplier, tokens), policy(history, multiplier, changed)
    torch.testing.assert_close(logits[:, :3], other[:, :3], rtol=0, atol=0)


def test_padding_changes_nothing(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history()
    tokens = torch.tensor([[SOS, 4]] * 6)
    garbage = dataclasses.replace(
        history,
        **{name: torch.cat([getattr(history, name), torch.full_like(getattr(history, name)[:, :3], 2)], dim=1)
           for name in ("numeric", "categorical", "incentives", "outcomes")},
    )  # fmt: skip
    a, b = policy(history, torch.ones(6), tokens), policy(garbage, torch.ones(6), tokens)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5])
def test_events_beyond_the_window_are_not_read(window: int, make_policy: Make, make_history: MakeHistory) -> None:
    policy, history, multiplier = make_policy(window=window), make_history(), torch.linspace(0, 3, 6)
    seen, tokens = history.last(window), torch.tensor([[SOS, 4]] * 6)
    assert torch.equal(policy(history, multiplier, tokens), policy(seen, multiplier, tokens))
    assert torch.equal(policy.allocate(history, multiplier), policy.allocate(seen, multiplier))
    assert torch.equal(policy.generate(history, multiplier).log_probs, policy.generate(seen, multiplier).log_probs)
    assert torch.equal(policy.expert_usage(history, multiplier), policy.expert_usage(seen, multiplier))
    memory = policy.remember(policy.causal_states(history), history.lengths, multiplier)
    assert torch.equal(policy.score(memory, tokens[:, None])[:, 0], policy(seen, multiplier, tokens))


def test_the_pending_incentive_and_outcome_are_never_read(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history()
    told = dataclasses.replace(history, incentives=history.incentives.clone(), outcomes=history.outcomes.clone())
    rows, last = torch.arange(6), history.lengths - 1
    told.incentives[rows, last] = 77
    told.outcomes[rows, last] = torch.nan
    tokens = torch.tensor([[SOS]] * 6)
    assert torch.equal(policy(history, torch.ones(6), tokens), policy(told, torch.ones(6), tokens))


def test_the_multiplier_reaches_the_logits(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history()
    tokens = torch.tensor([[SOS]] * 6)
    low, high = policy(history, torch.zeros(6), tokens), policy(history, torch.full((6,), 3.0), tokens)
    finite = low.isfinite()
    assert (low[finite] - high[finite]).abs().max() > 1e-3


def test_missing_features_are_not_the_median(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(), make_history(full=True)
    missing = dataclasses.replace(history, numeric=history.numeric.clone())
    missing.numeric[:, -1] = torch.nan
    median = dataclasses.replace(history, numeric=history.numeric.clone())
    median.numeric[:, -1] = 0
    tokens = torch.tensor([[SOS]] * 6)
    a, b = policy(missing, torch.ones(6), tokens), policy(median, torch.ones(6), tokens)
    finite = a.isfinite()
    assert a[finite].isfinite().all() and not torch.allclose(a[finite], b[finite])


@pytest.mark.parametrize("changes", [{}, {"canonical": False, "maximum_amount": 200.0}, {"decoder_layers": 2}])
def test_generation_is_teacher_forced_argmax(changes: dict, make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(**changes), make_history()
    multiplier = torch.linspace(0, 3, 6)
    generation = policy.generate(history, multiplier)
    tokens = generation.tokens[:, 0]
    logits = policy(history, multiplier, with_sos(tokens))
    assert torch.equal(logits.argmax(dim=-1), tokens)
    log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(
        generation.log_probs[:, 0], log_probs.masked_fill(tokens == PAD, 0), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(generation.amounts[:, 0], policy.choices.token_values[tokens].sum(dim=-1))
    assert torch.equal(policy.allocate(history, multiplier), generation.amounts[:, 0])


def test_one_token_amounts_need_one_step(make_policy: Make, make_history: MakeHistory) -> None:
    listed = (0.0, 1.0, 7.0, 30.0, 100.0)
    policy, history = make_policy(allowed_amounts=listed), make_history()
    assert policy.single_step
    generation = policy.generate(
        history, torch.ones(6), samples=50, greedy=False, generator=torch.Generator().manual_seed(0)
    )
    assert set(generation.amounts.flatten().tolist()) <= set(listed)
    tokens = generation.tokens[:, 0]
    log_probs = policy(history, torch.ones(6), with_sos(tokens)).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(
        generation.log_probs[:, 0], log_probs.masked_fill(tokens == PAD, 0), rtol=1e-4, atol=1e-5
    )


def test_samples_follow_the_policy(make_policy: Make, make_history: MakeHistory) -> None:
    policy, history = make_policy(allowed_amounts=(0.0, 1.0, 7.0)), make_history(count=1)
    generator = torch.Generator().manual_seed(1)
    generation = policy.generate(history, torch.ones(1), samples=20_000, greedy=False, generator=generator)
    probability = policy(history, torch.ones(1), torch.tensor([[SOS]]))[0, 0].softmax(dim=-1)
    for amount, token in ((0.0, 2), (7.0, 5), (1.0, 6)):
        share = (generation.amounts == amount).double().mean()
        assert abs(share - probability[token]) < 4 * (0.25 / 20_000) ** 0.5


def test_save_and_load_bit_for_bit(make_policy: Make, make_history: MakeHistory, tmp_path: Path) -> None:
    policy = make_policy(allowed_amounts=(0.0, 1.0, 7.0))
    policy.save_pretrained(tmp_path / "policy")
    loaded = Policy.from_pretrained(tmp_path / "policy").eval()
    assert loaded.config == policy.config and loaded.scaling == policy.scaling
    for name, value in policy.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    history = make_history()
    assert torch.equal(policy.allocate(history, torch.ones(6)), loaded.allocate(history, torch.ones(6)))
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {
        "model.safetensors", "config.json", "scaling.json", "vocabulary.json",
    }  # fmt: skip


def test_load_names_what_is_missing(tmp_path: Path, make_policy: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: not found"):
        Policy.from_pretrained(tmp_path)
    make_policy().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: not found"):
        Policy.from_pretrained(tmp_path)


def test_weights_of_another_policy_are_refused(tmp_path: Path, make_policy: Make) -> None:
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    with torch.no_grad():
        policy.encoder.condition_input.weight += 1
    policy.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)  # as where files were copied one by one
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: not the weights that .*config\.json"):
        Policy.from_pretrained(tmp_path)
    values = json.loads(config)
    del values["weights_sha256"]  # a folder of an earlier version
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = Policy.from_pretrained(tmp_path)
    assert torch.equal(loaded.encoder.condition_input.weight, policy.encoder.condition_input.weight)


@pytest.mark.parametrize("earlier_version", [False, True])
@pytest.mark.parametrize("written", [0, 1, 2, 3, 4])
def test_saving_that_was_killed_is_noticed(
    written: int, earlier_version: bool, tmp_path: Path, make_policy: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_policy(maximum_amount=50.0), make_policy(maximum_amount=80.0)
    with torch.no_grad():
        new.encoder.condition_input.weight += 1
    old.save_pretrained(tmp_path)
    if earlier_version:
        values = json.loads((tmp_path / "config.json").read_text())
        del values["weights_sha256"]
        (tmp_path / "config.json").write_text(json.dumps(values))
    replace, files = os.replace, itertools.count()

    def stop_after_some(*paths: Path) -> None:
        if next(files) >= written:
            raise KeyboardInterrupt
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop_after_some)
        with pytest.raises(KeyboardInterrupt) if written < 4 else contextlib.nullcontext():
            new.save_pretrained(tmp_path)
    if 0 < written < 4:
        with pytest.raises(ConfigurationError, match=r"model\.safetensors: not the weights that .*config\.json"):
            Policy.from_pretrained(tmp_path)
        return
    loaded, expected = Policy.from_pretrained(tmp_path), new if written else old
    assert loaded.config == expected.config
    assert torch.equal(loaded.encoder.condition_input.weight, expected.encoder.condition_input.weight)


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, make_policy: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_policy().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        make_policy(dimension=32).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", None, r"config\.json: not JSON"),
        ("scaling.json", None, r"scaling\.json: not JSON"),
        ("config.json", {"vocabulary": ...}, r"config\.json: PolicyConfig: the setting 'vocabulary' is missing"),
        ("config.json", {"heads": "2"}, r"config\.json: PolicyConfig: heads='2': a str came; expected int"),
        ("config.json", {"vocabulary": [1, None]}, r"config\.json: PolicyConfig: vocabulary=.*tuple\[float, \.\.\.\]"),
        ("config.json", {"heads": 3}, r"config\.json: heads=3: expected a divisor"),
        ("config.json", {"kind": "x"}, r"config\.json: PolicyConfig: unknown setting 'kind'"),
        ("scaling.json", {"incentive_max": ...}, r"scaling\.json: FeatureScaling: .* 'incentive_max' is missing"),
        ("scaling.json", {"numeric_std": [1.0]}, r"scaling\.numeric_std has 1 entries, the policy has 2 such columns"),
        ("scaling.json", {"numeric_mean": 0.0}, r"scaling\.json: FeatureScaling: numeric_mean=0\.0: a float came"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, make_policy: Make, name: str, change: dict | None, message: str
) -> None:
    make_policy().save_pretrained(tmp_path)
    path = tmp_path / name
    if change is None:
        path.write_bytes(path.read_bytes()[:20])
    else:
        values = {**json.loads(path.read_text()), **change}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    with pytest.raises(ConfigurationError, match=message + ".*; save the policy there again"):
        Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, h: p(h, torch.ones(5), torch.full((6, 1), SOS)), r"multiplier: shape \(5,\)"),
        (lambda p, h: p(h, torch.ones(6), torch.full((5, 1), SOS)), r"tokens: shape \(5, 1\)"),
        (lambda p, h: p(h, torch.ones(6), torch.full((6, 30), SOS)), r"max_length=9"),
        (lambda p, h: p.generate(h, torch.ones(6), samples=0), "samples=0"),
        (lambda p, h: p.allocate(dataclasses.replace(h, numeric=h.numeric[..., :1]), torch.ones(6)), "built for"),
    ],
)
def test_bad_input_is_named(call: Callable, message: str, make_policy: Make, make_history: MakeHistory) -> None:
    with pytest.raises(ValueError, match=message):
        call(make_policy(), make_history())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": (1.0, 2.0)}, "strictly descending"),
        ({"vocabulary": ()}, "at least one value"),
        ({"vocabulary": (1.0,), "heads": 3}, "a divisor of dimension=64"),
        ({"vocabulary": (1.0,), "experts_per_token": 9}, "between 1 and experts=4"),
        ({"vocabulary": (1.0,), "dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_bad_settings_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PolicyConfig(**changes)


def test_an_empty_batch_gives_empty_results(make_policy: Make, make_history: MakeHistory) -> None:
    for changes in ({}, {"allowed_amounts": (0.0, 1.0, 7.0)}):
        policy, history = make_policy(**changes), make_history(count=0)
        nothing = torch.zeros(0)
        assert policy.allocate(history, nothing).shape == (0,)
        assert policy.generate(history, nothing, samples=3).amounts.shape == (0, 3)
        logits = policy(history, nothing, torch.ones(0, 2, dtype=torch.int64))
        assert logits.shape == (0, 2, policy.config.vocabulary_size)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_multipliers_that_cannot_be(multiplier: float, make_policy: Make, make_history: MakeHistory) -> None:
    with pytest.raises(ValueError, match=r"multiplier: .* came; expected finite numbers of at least 0"):
        make_policy().allocate(make_history(), torch.full((6,), multiplier))
    with pytest.raises(ValueError, match="multiplier: a float came"):
        make_policy().allocate(make_history(), 1.0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperatures_that_cannot_be(temperature: float, make_policy: Make, make_history: MakeHistory) -> None:
    with pytest.raises(ValueError, match="temperature="):
        make_policy().generate(make_history(), torch.ones(6), greedy=False, temperature=temperature)
