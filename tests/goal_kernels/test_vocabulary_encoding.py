"""encode and decode: exactness, order of tokens, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from goal_kernels.vocabulary import build_vocabulary, decode, encode, reference

COINS = np.array([3000.0, 1806.0, 1123.0, 546.0, 301.0, 133.0, 57.0, 19.0, 7.0, 3.0, 2.0, 1.0])
REAL = np.array([2318.1438812, 881.59535203, 187.41308356, 40.1, 7.51158357, 1.06623305, 0.7])
LARGEST = 2**53


def rows(encoding) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(encoding.tokens, encoding.lengths, strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 2000), max_size=30),
    st.sets(st.integers(2, 10**4), max_size=20),
    st.sampled_from([1.0, 0.01, 0.05, 0.3, 0.25, 5.0, 1e-6]),
)
def test_multiples_of_the_unit_round_trip(counts, larger, unit):
    fraction = reference.as_fraction(unit)
    vocabulary = [float(count * fraction) for count in sorted(larger | {10**5}, reverse=True)] + [unit]
    amounts = [float(count * fraction) for count in counts]
    encoding = encode(np.array(amounts), np.array(vocabulary), max_length=2000)
    assert rows(encoding) == reference.encode(amounts, vocabulary, max_length=2000)
    assert decode(encoding.tokens, np.array(vocabulary)).tolist() == amounts


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, LARGEST), max_size=30), st.sampled_from([1, 2**-20, 3]))
def test_up_to_2_53_units_round_trip(counts, unit):
    vocabulary = np.array([float(2**power * unit) for power in range(53, -1, -1)])
    amounts = np.array([count * unit for count in counts], dtype=np.float64)
    tokens, lengths = encode(amounts, vocabulary, max_length=53)
    assert decode(tokens, vocabulary).tolist() == amounts.tolist()
    if unit == 1:
        assert lengths.tolist() == [count.bit_count() for count in counts]
        assert np.array_equal(encode(np.array(counts, dtype=np.int64), vocabulary, max_length=53).tokens, tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e5), max_size=40), st.sampled_from([COINS, REAL]))
def test_greedy_leaves_less_than_the_smallest_value(amounts, vocabulary):
    values = np.array(amounts, dtype=np.float64)
    encoding = encode(values, vocabulary, max_length=60)
    assert rows(encoding) == reference.encode(amounts, vocabulary.tolist(), max_length=60)
    decoded = decode(encoding.tokens, vocabulary)
    assert decoded.tolist() == reference.decode(rows(encoding), vocabulary.tolist())
    rounding = 60 * np.spacing(values)
    assert (decoded <= values + rounding).all()
    assert (values - decoded < vocabulary[-1] + rounding).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=50), st.sampled_from([0.1, 1.0]))
@example([2048.999999999998], 1.0)  # a whole amount when it is fitted, so when it is encoded too
def test_fitted_amounts_are_within_the_larger_of_error_and_unit(amounts, min_unit):
    values = np.array(amounts)
    vocabulary = build_vocabulary(values, min_unit=min_unit)
    tokens, _ = encode(values, vocabulary, max_length=2000)
    error = np.abs(decode(tokens, vocabulary) - values)
    assert (error <= np.maximum(1e-3 * values, min_unit)).all()


def test_rows_never_decrease_and_end_in_fill():
    amounts = np.minimum(np.ceil(np.random.default_rng(0).lognormal(4.5, 1.4, 300_000)), 3000.0)
    tokens, lengths = encode(amounts, COINS, max_length=16, threads=2)
    assert tokens.dtype == np.int32
    assert lengths.dtype == np.int32
    used = np.arange(16) < lengths[:, None]
    assert ((tokens >= 0) == used).all()
    assert (np.diff(tokens, axis=1)[used[:, 1:]] >= 0).all()
    assert np.array_equal(decode(tokens, COINS, threads=2), amounts)


@pytest.mark.parametrize("vocabulary", [COINS, REAL, np.array([70.0]), np.geomspace(3000, 0.9, 400)])
@pytest.mark.parametrize("width", [3, 16, 61])
def test_large_arrays_match_single_amounts_for_any_threads(vocabulary, width):
    amounts = np.random.default_rng(3).lognormal(3, 1.5, 150_000)
    amounts[:5] = [0.0, vocabulary[-1], vocabulary[0], np.nextafter(vocabulary[0], 0), 5e4]
    one = encode(amounts, vocabulary, max_length=width, on_overflow="truncate", threads=1)
    three = encode(amounts, vocabulary, max_length=width, on_overflow="truncate", threads=3)
    assert np.array_equal(one.tokens, three.tokens)
    assert np.array_equal(one.lengths, three.lengths)
    assert one.truncated == three.truncated
    few = encode(amounts[:300], vocabulary, max_length=width, on_overflow="truncate")
    assert np.array_equal(few.tokens, one.tokens[:300])
    assert np.array_equal(few.lengths, one.lengths[:300])


def test_float32_does_not_lose_a_unit():
    counts = np.arange(1, 200_001)
    vocabulary = np.array([1000.0, 100.0, 10.0, 1.0, 0.1, 0.01])
    narrow = (counts / 100).astype(np.float32)
    tokens, _ = encode(narrow, vocabulary, max_length=80)
    assert np.array_equal(decode(tokens, vocabulary), counts / 100)
    whole = np.array([2**24 - 1, 2**24, 16_777_213], dtype=np.float32)
    powers = 2.0 ** np.arange(24, -1, -1)
    tokens, _ = encode(whole, powers, max_length=25)
    assert decode(tokens, powers).tolist() == whole.tolist()


def test_sums_of_prices_do_not_lose_a_unit():
    vocabulary = np.array([1.0, 0.1, 0.01])
    amounts = np.array([0.7 + 0.1, 0.1 + 0.2, 1.1 * 1.1 - 0.41])
    tokens, _ = encode(amounts, vocabulary, max_length=20)
    assert decode(tokens, vocabulary).tolist() == [0.8, 0.3, 0.8]
    tokens, _ = encode(np.array([20.49 * 100, 2**46 + 1.5]), np.array([2.0**46, 100.0, 1.0]), max_length=100)
    assert decode(tokens, np.array([2.0**46, 100.0, 1.0])).tolist() == [2049, 2**46 + 1]


def test_zero_is_the_empty_sequence():
    tokens, lengths = encode(np.array([0.0, -0.0]), COINS, max_length=3)
    assert lengths.tolist() == [0, 0]
    assert (tokens == -1).all()
    assert decode(tokens, COINS).tolist() == [0.0, 0.0]


def test_empty_arrays():
    tokens, lengths = encode(np.zeros(0, np.float32), COINS, max_length=5)
    assert tokens.shape == (0, 5)
    assert lengths.shape == (0,)
    assert decode(tokens, COINS).shape == (0,)
    assert decode(np.zeros((3, 0), np.int32), COINS).tolist() == [0.0, 0.0, 0.0]


def test_too_long_is_an_error_or_is_counted():
    amounts = np.array([5.0, 9000.0, 12_001.0, 15_000.0])
    with pytest.raises(ValueError, match=r"values\[2\] is 12001 and needs more than max_length = 4"):
        encode(amounts, COINS, max_length=4)
    encoding = encode(amounts, COINS, max_length=4, on_overflow="truncate")
    assert encoding.truncated == 2
    assert encoding.lengths.tolist() == [2, 3, 4, 4]
    assert decode(encoding.tokens, COINS).tolist() == [5.0, 9000.0, 12_000.0, 12_000.0]
    with pytest.raises(ValueError, match="on_overflow"):
        encode(amounts, COINS, max_length=4, on_overflow="wrap")


def test_amounts_far_beyond_the_vocabulary():
    encoding = encode(np.array([1e300, 1.7e308, 2.0**60]), COINS, max_length=2, on_overflow="truncate")
    assert encoding.truncated == 3


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (np.array([]), "empty"),
        ([], "empty"),
        (np.array([1.0, 2.0]), r"vocabulary\[1\] is 2 after 1, expected strictly descending"),
        (np.array([2.0, 2.0]), "strictly descending"),
        (np.array([2.0, 0.0]), r"vocabulary\[1\] is 0, expected a finite value above 0"),
        (np.array([2.0, -1.0]), "above 0"),
        (np.array([np.inf, 1.0]), "finite"),
        (np.array([np.nan]), "finite"),
        (np.array([2.0, 1.0], dtype=np.float32), "vocabulary has dtype float32"),
        (np.array([2, 1]), "vocabulary has dtype int64"),
        (np.array([[2.0, 1.0]]), r"vocabulary has shape \(1, 2\)"),
    ],
)
def test_bad_vocabularies_are_refused(vocabulary, message):
    with pytest.raises(ValueError, match=message):
        encode(np.array([1.0]), vocabulary, max_length=4)
    with pytest.raises(ValueError, match=message):
        decode(np.array([[0]], dtype=np.int32), vocabulary)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bad_tokens_are_refused(dtype):
    for bad in (12, -2, np.iinfo(dtype).min, np.iinfo(dtype).max):
        tokens = np.array([[0, -1, -1, -1, -1], [1, 2, 3, 4, bad]], dtype=dtype)
        with pytest.raises(ValueError, match=rf"tokens\[1, 4\] is {bad}, but the vocabulary has the tokens 0 to 11"):
            decode(tokens, COINS)
    assert decode(np.array([[11, -1, -1, -1, 10]], dtype=dtype), COINS).tolist() == [3.0]


def test_wrong_types_are_refused():
    with pytest.raises(ValueError, match="tokens has dtype float64"):
        decode(np.array([[1.0]]), COINS)
    with pytest.raises(ValueError, match="tokens has dtype uint8"):
        decode(np.array([[1]], dtype=np.uint8), COINS)
    with pytest.raises(ValueError, match=r"tokens has shape \(1,\)"):
        decode(np.array([1], dtype=np.int32), COINS)
    with pytest.raises(ValueError, match="values has dtype int32"):
        encode(np.array([1], dtype=np.int32), COINS, max_length=3)
    with pytest.raises(ValueError, match="max_length"):
        encode(np.array([1.0]), COINS, max_length=0)
    with pytest.raises(TypeError, match="max_length"):
        encode(np.array([1.0]), COINS, max_length=2.0)


def test_strided_and_read_only_arrays():
    amounts = np.arange(3000.0)
    amounts.setflags(write=False)
    vocabulary = np.repeat(COINS, 2)[::2]
    vocabulary.setflags(write=False)
    tokens, _ = encode(amounts[::-3], vocabulary, max_length=16)
    assert np.array_equal(decode(np.asfortranarray(tokens), vocabulary), amounts[::-3])


def test_memory_of_a_dropped_result_is_used_again_and_of_a_living_one_never():
    amounts = np.arange(600_000) % 3000.0  # 36 MiB of tokens
    first = encode(amounts, COINS, max_length=16).tokens
    second = encode(amounts[::-1], COINS, max_length=16).tokens
    assert not np.shares_memory(first, second)
    row = first[2999]  # a view keeps the whole alive
    address = second.ctypes.data
    copy = second.copy()
    del first, second
    third = encode(amounts[::-1] * 0, COINS, max_length=15).tokens
    assert third.ctypes.data == address
    assert (third == -1).all()
    del third
    fourth = encode(amounts[::-1], COINS, max_length=16).tokens
    assert np.array_equal(fourth, copy)
    assert row.tolist() == encode(amounts[2999:3000], COINS, max_length=16).tokens[0].tolist()


def test_a_small_result_does_not_hold_the_memory_of_a_large_one():
    large = encode(np.zeros(2_000_000), COINS, max_length=16).tokens  # 122 MiB
    address = large.ctypes.data
    del large
    assert encode(np.zeros(600_000), COINS, max_length=16).tokens.ctypes.data != address


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=12, unique=True), st.lists(st.floats(0, 1e300), max_size=8)
)
def test_any_vocabulary_agrees_with_the_twin(values, amounts):
    vocabulary = sorted(values, reverse=True)
    assume(reference.find_unit(vocabulary, vocabulary[-1]) is None)
    encoding = encode(np.array(amounts, dtype=np.float64), vocabulary, max_length=5, on_overflow="truncate")
    for amount, row in zip(amounts, rows(encoding), strict=True):
        try:
            assert reference.encode([amount], vocabulary, max_length=5) == [row]
        except ValueError:
            assert len(row) == 5
