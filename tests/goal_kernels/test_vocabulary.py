"""build_vocabulary against its plain-Python twin and against Algorithm 1 in NumPy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal_kernels.vocabulary import build_vocabulary, decode, encode, reference

OPTIONS = st.fixed_dictionaries(
    {
        "q_start": st.sampled_from([1.0, 0.9999, 0.95, 0.5]),
        "q_end": st.sampled_from([0.5, 0.3, 0.01]),
        "decay": st.sampled_from([1.0, 0.99, 0.8]),
        "relative_error": st.sampled_from([0.0, 1e-3, 0.3, 2.0]),
        "max_tokens": st.sampled_from([1, 2, 5, 512]),
    }
)


def numpy_vocabulary(values: np.ndarray, min_unit: float = 1.0, max_tokens: int = 512) -> np.ndarray:
    """Algorithm 1 with the default settings, in floats."""
    amounts = values[values > 0].astype(np.float64)
    residuals, tokens, q, error = amounts.copy(), set(), 0.9999, np.inf
    while error > 1e-3 and len(tokens) + 1 < max_tokens:
        token = np.quantile(residuals[residuals > 0], q, method="inverted_cdf")
        if token <= min_unit:
            break
        tokens.add(token)
        residuals[residuals >= token] -= token
        error = (residuals / amounts).max()
        q = max(q * 0.99, 0.9)
    return np.array(sorted(tokens | {min_unit}, reverse=True))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), OPTIONS)
def test_build_vocabulary_matches_twin_on_whole_amounts(amounts, options):
    if not any(amounts):
        amounts = [*amounts, 1]
    expected = reference.build_vocabulary(amounts, **options)
    for dtype in (np.int64, np.float64, np.float32):
        assert build_vocabulary(np.array(amounts, dtype), **options).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.sampled_from([0.01, 0.05, 0.3, 0.25, 1.0]), OPTIONS)
def test_build_vocabulary_matches_twin_on_cents(cents, min_unit, options):
    amounts = [cent / 100 for cent in cents]
    expected = reference.build_vocabulary(amounts, min_unit=min_unit, **options)
    actual = build_vocabulary(np.array(amounts), min_unit=min_unit, **options).tolist()
    assert actual == pytest.approx(expected, rel=1e-15)  # a log of products k * unit is answered in products


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40), st.sampled_from([0.1, 1.0, 7.5]), OPTIONS)
def test_build_vocabulary_matches_twin_on_real_amounts(amounts, min_unit, options):
    expected = reference.build_vocabulary(amounts, min_unit=min_unit, **options)
    assert build_vocabulary(np.array(amounts), min_unit=min_unit, **options).tolist() == expected


def heavy_tailed(size: int = 150_000) -> np.ndarray:
    return np.random.default_rng(5).lognormal(4.5, 1.4, size)


LARGE = {
    "coins": lambda: np.minimum(np.ceil(heavy_tailed()), 3000.0),  # counted by value
    "few distinct, far apart": lambda: np.round(heavy_tailed(), -1) * 1e6 + 1e6,  # counted in a hash table
    "distinct whole": lambda: np.round(heavy_tailed() * 1e4),  # in buckets, on a grid
    "real": heavy_tailed,  # in buckets
    "real, in one bucket": lambda: 1e6 + heavy_tailed() / 1e4,
    "real, above the unit": lambda: 2.0 + heavy_tailed(),  # every amount is touched: the error bound matters
}


@pytest.mark.parametrize("name", LARGE)
def test_build_vocabulary_matches_numpy_on_large_data(name):
    amounts = LARGE[name]()
    expected = numpy_vocabulary(amounts)
    assert build_vocabulary(amounts, threads=1).tolist() == expected.tolist()
    assert build_vocabulary(amounts, threads=3).tolist() == expected.tolist()


def test_build_vocabulary_stops_at_the_error_bound():
    amounts = np.linspace(50.0, 99.0, 4000) + 1e-7
    loose, tight = (build_vocabulary(amounts, relative_error=error, min_unit=0.01) for error in (0.5, 1e-3))
    assert loose.tolist() == reference.build_vocabulary(amounts.tolist(), relative_error=0.5, min_unit=0.01)
    assert tight.tolist() == reference.build_vocabulary(amounts.tolist(), relative_error=1e-3, min_unit=0.01)
    assert len(loose) < len(tight)


def test_build_vocabulary_of_small_whole_amounts_is_small():
    amounts = np.random.default_rng(0).integers(0, 11, 10_000)
    assert build_vocabulary(amounts).tolist() == [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_build_vocabulary_leaves_zeros_out():
    amounts = np.random.default_rng(1).integers(1, 500, 5000)
    with_zeros = np.concatenate([amounts, np.zeros(50_000, np.int64)])
    assert build_vocabulary(with_zeros).tolist() == build_vocabulary(amounts).tolist()


def test_build_vocabulary_holds_the_cap_and_the_unit():
    amounts = heavy_tailed(20_000)
    for cap in (1, 2, 10):
        vocabulary = build_vocabulary(amounts, max_tokens=cap, min_unit=0.5)
        assert len(vocabulary) == cap
        assert vocabulary[-1] == 0.5
        assert (np.diff(vocabulary) < 0).all()


def test_build_vocabulary_of_amounts_below_the_unit_is_the_unit():
    assert build_vocabulary(np.array([0.2, 0.31, 0.0]), min_unit=1.0).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_build_vocabulary_keeps_decimals_as_written(dtype):
    amounts = (np.arange(1, 3000) / 100).astype(dtype)
    vocabulary = build_vocabulary(amounts, min_unit=0.01)
    assert vocabulary.tolist() == [round(value, 2) for value in vocabulary.tolist()]
    products = np.arange(1, 3000) * 0.01
    assert set(build_vocabulary(products, min_unit=0.01).tolist()) <= set(products.tolist())


def test_build_vocabulary_takes_strided_and_read_only_arrays():
    amounts = np.minimum(np.ceil(heavy_tailed(30_000)), 3000.0)
    expected = build_vocabulary(np.ascontiguousarray(amounts[::3])).tolist()
    frozen = amounts.copy()
    frozen.setflags(write=False)
    assert build_vocabulary(frozen[::3]).tolist() == expected
    assert build_vocabulary(amounts[::-1]).tolist() == build_vocabulary(amounts).tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, np.nan]), r"values\[1\] is nan"),
        (np.array([np.inf, 1.0]), r"values\[0\] is inf"),
        (np.array([3.0, -0.5]), r"values\[1\] is -0.5"),
        (np.array([1, 2, -7]), r"values\[2\] is -7"),
        (np.array([1, 2**53 + 1]), r"at most 2\^53"),
        (np.array([], dtype=np.float64), "none above 0"),
        ([], "none above 0"),
        (np.zeros(5), "5 entries and none above 0"),
        (np.array([True, False]), "dtype bool"),
        (np.array([1, 2], dtype=np.int32), "dtype int32"),
        (np.array([1.0], dtype=np.float16), "dtype float16"),
        (np.array([1.0], dtype=">f8"), "dtype >f8"),
        (np.array(["3"]), "dtype <U1"),
        (np.array([[1.0]]), r"shape \(1, 1\)"),
        (np.array(1.0), r"shape \(\)"),
    ],
)
def test_build_vocabulary_refuses_bad_amounts(values, message):
    with pytest.raises(ValueError, match=message):
        build_vocabulary(values)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("q_start", 0.0),
        ("q_start", 1.5),
        ("q_end", 0.99999),
        ("q_end", float("nan")),
        ("decay", 0.0),
        ("relative_error", -1.0),
        ("relative_error", float("inf")),
        ("min_unit", 0.0),
        ("min_unit", float("nan")),
        ("max_tokens", 0),
        ("threads", 0),
    ],
)
def test_build_vocabulary_refuses_bad_options(option, value):
    with pytest.raises(ValueError, match=option):
        build_vocabulary(np.array([1.0, 2.0]), **{option: value})


def test_first_bad_amount_is_named_whatever_the_threads():
    amounts = np.ones(400_000)
    amounts[[250_000, 399_999]] = np.nan
    for threads in (1, 2, 5):
        with pytest.raises(ValueError, match=r"values\[250000\]"):
            build_vocabulary(amounts, threads=threads)
        with pytest.raises(ValueError, match=r"values\[250000\]"):
            encode(amounts, [1.0], max_length=2, threads=threads)


def test_thread_count_comes_from_argument_then_environment(monkeypatch):
    amounts = np.arange(1.0, 10.0)
    monkeypatch.setenv("GOAL_KERNELS_THREADS", "2")
    assert len(build_vocabulary(amounts)) == 9
    monkeypatch.setenv("GOAL_KERNELS_THREADS", "many")
    with pytest.raises(ValueError, match="GOAL_KERNELS_THREADS is 'many'"):
        build_vocabulary(amounts)
    assert len(build_vocabulary(amounts, threads=1)) == 9
    with pytest.raises(TypeError, match="threads"):
        build_vocabulary(amounts, threads=1.5)


def test_calls_from_several_python_threads_agree():
    amounts = heavy_tailed(200_000)
    expected = build_vocabulary(amounts)

    def work(_):
        vocabulary = build_vocabulary(amounts, threads=2)
        tokens, _ = encode(amounts, vocabulary, max_length=40, threads=2)
        return vocabulary.tolist(), decode(tokens, vocabulary, threads=2)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(6)))
    assert all(vocabulary == expected.tolist() for vocabulary, _ in results)
    assert all(np.array_equal(amounts_back, results[0][1]) for _, amounts_back in results)
