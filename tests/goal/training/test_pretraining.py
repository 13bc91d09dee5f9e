"""Weighted next-token prediction."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from goal import IncentiveTokenizer, Policy
from goal.config import LoopConfig, PretrainingConfig
from goal.data import Data
from goal.tokenizer import EOS, PAD, SOS
from goal.training import Loop, Pretraining
from goal.training.pretraining import weighted_next_token_loss

CONFIG = PretrainingConfig(loop=LoopConfig(steps=150, batch_size=128, learning_rate=1e-2))


def fit(policy: Policy, data: Data, tokenizer: IncentiveTokenizer) -> np.ndarray:
    """Pretrain on the uniform log and return sampled amounts."""
    windows = data.windows(data.splits.training, policy.config.window)
    Loop(CONFIG.loop).run(Pretraining(policy, windows, tokenizer, CONFIG, (0.0, 1.5, 3.0)))
    history = windows.batch(np.arange(0, len(windows), 4))
    generator = torch.Generator().manual_seed(0)
    generation = policy.eval().generate(
        history, torch.full((len(history),), 1.5), samples=20, greedy=False, generator=generator
    )
    return generation.amounts.numpy()


@pytest.mark.parametrize("correct", [True, False])
def test_the_mean_sampled_amount_is_the_logs(
    correct: bool, policy: Policy, data: Data, tokenizer: IncentiveTokenizer
) -> None:
    config = dataclasses.replace(policy.config, correct_weighting=correct, weight_smoothing=0.1)
    torch.manual_seed(0)
    mean = fit(Policy(config, data.scaling), data, tokenizer).mean()
    if correct:
        expected = data.log.incentives.mean()
    else:  # left alone, the weighted likelihood learns p * omega: 6.2 for a uniform log of mean 5
        amounts = np.arange(11)
        omega = np.log10(amounts + 1) + 0.1
        expected = (amounts * omega).sum() / omega.sum()
        assert expected > 6.1
    assert abs(mean - expected) < 0.25


def test_loss_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator)
    targets = torch.tensor([[3, 4, EOS, PAD], [EOS, PAD, PAD, PAD], [6, 6, 6, EOS]])
    weights = torch.rand(7, generator=generator) + 0.5
    expected = 0.0
    for row in range(3):
        for step in range(4):
            token = int(targets[row, step])
            if token != PAD:
                expected += float(weights[token]) * -float(logits[row, step].log_softmax(dim=-1)[token])
    assert float(weighted_next_token_loss(logits, targets, weights)) == pytest.approx(expected / 3, rel=1e-5)


def test_forbidden_choices_give_finite_gradients() -> None:
    logits = torch.zeros(1, 2, 5, requires_grad=True)
    mask = torch.tensor([[[False, False, True, True, False], [True, False, False, False, False]]])
    loss = weighted_next_token_loss(logits.masked_fill(~mask, -torch.inf), torch.tensor([[EOS, PAD]]), torch.ones(5))
    loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad[0, 1] == 0).all()


def test_token_weights_are_omega(policy: Policy) -> None:
    config = policy.config
    assert float(policy.token_weights[EOS]) == pytest.approx(config.weight_smoothing)
    for place, value in enumerate(config.vocabulary):
        assert float(policy.token_weights[3 + place]) == pytest.approx(np.log10(value + 1) + config.weight_smoothing)
    assert SOS == 1
