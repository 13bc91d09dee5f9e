"""VocabularyAccumulator: the same vocabulary as one call, whatever the split, the order or the machine."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal_kernels.vocabulary import VocabularyAccumulator, build_vocabulary

CAPACITY = 2048


def accumulate(*chunks, capacity: int = 1 << 20) -> VocabularyAccumulator:
    accumulator = VocabularyAccumulator(capacity)
    for chunk in chunks:
        accumulator.add(chunk)
    return accumulator


def merged(*parts: VocabularyAccumulator) -> VocabularyAccumulator:
    result = VocabularyAccumulator.from_bytes(parts[0].to_bytes())
    for part in parts[1:]:
        result.merge(part)
    return result


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5000), max_size=40), min_size=1, max_size=5), st.sampled_from([1.0, 0.01]))
def test_grid_is_exact_for_any_split(chunks, min_unit):
    parts = [np.array(chunk, dtype=np.float64) * min_unit for chunk in chunks]
    everything = np.concatenate(parts)
    if not everything.any():
        return
    accumulator = merged(*[accumulate(part) for part in parts])
    assert accumulator.exact
    assert accumulator.amounts == len(everything)
    assert accumulator.zeros == (everything == 0).sum()
    assert accumulator.build(min_unit=min_unit).tolist() == build_vocabulary(everything, min_unit=min_unit).tolist()


@pytest.mark.parametrize("capacity", [CAPACITY, 1 << 20])
def test_state_depends_on_the_amounts_alone(capacity):
    generator = np.random.default_rng(7)
    amounts = generator.lognormal(4.5, 1.4, 30_000)
    whole = accumulate(amounts, capacity=capacity).to_bytes()
    a, b, c = (accumulate(part, capacity=capacity) for part in np.split(amounts, [1000, 12_000]))
    assert merged(a, b, c).to_bytes() == whole
    assert merged(a, merged(b, c)).to_bytes() == whole
    assert merged(c, a, b).to_bytes() == whole
    assert accumulate(*np.array_split(generator.permutation(amounts), 50), capacity=capacity).to_bytes() == whole


def test_merging_with_itself_doubles():
    accumulator = accumulate(np.array([1, 2, 2, 0]))
    accumulator.merge(accumulator)
    assert accumulator.amounts == 8
    assert [part.tolist() for part in accumulator.counted()] == [[1.0, 2.0], [2, 4]]


def test_real_amounts_stay_within_the_stated_rank_error():
    amounts = np.random.default_rng(8).lognormal(4.5, 1.4, 200_000)
    accumulator = accumulate(amounts, capacity=CAPACITY)
    assert not accumulator.exact
    assert accumulator.amounts == len(amounts)
    cells, counts = accumulator.counted()
    assert len(cells) <= CAPACITY
    assert counts.sum() == len(amounts)
    # Kept amounts were observed, and every amount lies less than the stated resolution above the one kept for it.
    ordered = np.sort(amounts)
    assert np.isin(cells, ordered).all()
    kept = cells[np.searchsorted(cells, ordered, side="right") - 1]
    assert ((ordered - kept) / ordered).max() < accumulator.relative_resolution
    # A percentile of the cells has a true rank within the stated rank error.
    for q in (0.5, 0.9, 0.99, 0.9999):
        rank = np.ceil(len(amounts) * q - 1)
        value = cells[np.searchsorted(counts.cumsum(), rank, side="right")]
        assert abs(np.searchsorted(ordered, value) - rank) / len(amounts) <= accumulator.rank_error
    assert accumulator.rank_error < 0.004


def test_real_vocabulary_is_close_to_the_one_shot_call():
    amounts = np.random.default_rng(9).lognormal(4.5, 1.4, 200_000)
    accumulator = accumulate(amounts, capacity=1 << 16)
    expected, actual = build_vocabulary(amounts), accumulator.build()
    assert len(actual) == len(expected)
    # Each token comes from residuals, and so gathers the errors of the tokens before it.
    assert np.abs(actual / expected - 1).max() < 2e-3
    assert accumulator.rank_error < 2e-4


def test_float32_chunks_build_what_float32_builds():
    narrow = (np.arange(1, 4000) / 100).astype(np.float32)
    expected = build_vocabulary(narrow, min_unit=0.01).tolist()
    assert accumulate(*np.array_split(narrow, 3)).build(min_unit=0.01).tolist() == expected


def test_a_bad_chunk_adds_nothing():
    accumulator = accumulate(np.array([1.0, 2.0]))
    before = accumulator.to_bytes()
    with pytest.raises(ValueError, match=r"values\[2\] is nan"):
        accumulator.add(np.array([5.0, 6.0, np.nan]))
    with pytest.raises(ValueError, match="dtype int16"):
        accumulator.add(np.array([5], dtype=np.int16))
    assert accumulator.to_bytes() == before


def test_refusals():
    with pytest.raises(ValueError, match="capacity is 100, expected 2048"):
        VocabularyAccumulator(100)
    with pytest.raises(ValueError, match="none above 0"):
        accumulate(np.zeros(3)).build()
    with pytest.raises(ValueError, match="capacity 2048, expected the same as here, 4096"):
        VocabularyAccumulator(4096).merge(VocabularyAccumulator(2048))
    with pytest.raises(TypeError, match="other is a dict"):
        VocabularyAccumulator().merge({})
    with pytest.raises(TypeError, match="data is a str"):
        VocabularyAccumulator.from_bytes("GOALVOC1")
    data = accumulate(np.array([1.0, 2.0])).to_bytes()
    for bad in (b"", data[:-1], data + b"x", b"x" + data[1:], data[:8] + b"\xff" * 8 + data[16:], data[:-8] + bytes(8)):
        with pytest.raises(ValueError, match="not a complete serialised VocabularyAccumulator"):
            VocabularyAccumulator.from_bytes(bad)


def test_state_pickles_as_bytes():
    accumulator = accumulate(np.array([3, 4, 4]))
    copy = VocabularyAccumulator.from_bytes(pickle.loads(pickle.dumps(accumulator.to_bytes())))
    assert copy.build().tolist() == accumulator.build().tolist()
    assert repr(copy) == "VocabularyAccumulator(3 amounts, 2 distinct, exact)"


def test_threads_may_share_one_accumulator():
    chunks = [np.random.default_rng(seed).integers(0, 900, 20_000) for seed in range(8)]
    accumulator = VocabularyAccumulator()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(accumulator.add, chunks))
    assert accumulator.to_bytes() == accumulate(np.concatenate(chunks)).to_bytes()
