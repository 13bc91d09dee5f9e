"""The masks against enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goal import IncentiveTokenizer, PolicyConfig
from goal.errors import ConfigurationError
from goal.model.choices import Choices
from goal.tokenizer import EOS, PAD, SOS

VALUES = (10.0, 4.0, 3.0, 1.0)


def written(choices: Choices) -> list[tuple[int, ...]]:
    """Every sequence that the rules allow, EOS included, by walking the tree."""
    done, open_ = [], [()]
    while open_:
        prefix = open_.pop()
        tokens = torch.tensor([[SOS, *prefix]])
        for token in choices.teacher_forced(tokens)[0, -1].nonzero()[:, 0].tolist():
            (done if token == EOS else open_).append((*prefix, token))
    return done


def amount_of(choices: Choices, sequence: tuple[int, ...]) -> float:
    return float(choices.token_values[list(sequence)].sum())


def test_canonical_sequences_are_the_greedy_decompositions() -> None:
    choices = Choices(PolicyConfig(vocabulary=VALUES, maximum_amount=25.0, max_length=17))
    sequences = written(choices)
    tokenizer = IncentiveTokenizer(VALUES, max_length=16)
    expected = tokenizer.encode(torch.arange(26.0).numpy())
    greedy = {tuple(row[(row != PAD) & (row != SOS)].tolist()) for row in expected}
    assert set(sequences) == greedy
    assert sorted(amount_of(choices, s) for s in sequences) == list(range(26))


def test_monotone_sequences_without_canonical() -> None:
    choices = Choices(PolicyConfig(vocabulary=(3.0, 1.0), maximum_amount=4.0, canonical=False, max_length=17))
    ids = {3: 3.0, 4: 1.0}
    expected = set()
    for length in range(5):
        for tokens in itertools.product(ids, repeat=length):
            values = [ids[token] for token in tokens]
            if values == sorted(values, reverse=True) and sum(values) <= 4:
                expected.add((*tokens, EOS))
    assert set(written(choices)) == expected


def test_only_listed_amounts_can_be_written() -> None:
    allowed = (0.0, 3.0, 8.0, 14.0, 20.0)
    choices = Choices(PolicyConfig(vocabulary=VALUES, allowed_amounts=allowed))
    assert sorted(amount_of(choices, s) for s in written(choices)) == list(allowed)
    assert not choices.single_step


def test_zero_can_be_forbidden() -> None:
    choices = Choices(PolicyConfig(vocabulary=VALUES, allowed_amounts=(3.0, 4.0)))
    assert choices.single_step
    assert sorted(amount_of(choices, s) for s in written(choices)) == [3.0, 4.0]


def test_length_bound_leaves_room_for_eos() -> None:
    choices = Choices(PolicyConfig(vocabulary=(1.0,), max_length=4))
    assert max(len(s) for s in written(choices)) == 4


def test_after_eos_only_pad() -> None:
    choices = Choices(PolicyConfig(vocabulary=VALUES))
    mask = choices.teacher_forced(torch.tensor([[SOS, 3, EOS, PAD]]))
    assert mask[0, 2].nonzero()[:, 0].tolist() == [PAD]
    assert mask[0, 3].nonzero()[:, 0].tolist() == [PAD]


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(1, 400), min_size=1, max_size=8, unique=True),
    amounts=st.lists(st.integers(0, 2000), min_size=1, max_size=20),
    unit=st.sampled_from([1.0, 0.25, 0.1]),
)
def test_every_encoded_amount_is_allowed(values: list[int], amounts: list[int], unit: float) -> None:
    vocabulary = tuple(unit * value for value in sorted({*values, 1}, reverse=True))
    tokenizer = IncentiveTokenizer(vocabulary, max_length=2500)
    choices = Choices(PolicyConfig(vocabulary=vocabulary, max_length=2501))
    for amount in amounts[:4]:
        tokens = tokenizer.encode([unit * amount])
        mask = choices.teacher_forced(tokens[:, :-1])
        assert mask.gather(-1, tokens[:, 1:, None]).all()


def test_allowed_amounts_need_canonical() -> None:
    with pytest.raises(ConfigurationError, match="canonical=True"):
        PolicyConfig(vocabulary=VALUES, allowed_amounts=(1.0,), canonical=False)
