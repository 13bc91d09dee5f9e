"""IncentiveTokenizer: ids, round trips, fitting, files."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import ConfigurationError, GoalError, LogError
from goal.tokenizer import EOS, PAD, SOS, IncentiveTokenizer
from goal_kernels.vocabulary import build_vocabulary


@pytest.fixture
def tokenizer() -> IncentiveTokenizer:
    return IncentiveTokenizer([50.0, 20.0, 5.0, 1.0], max_length=8)


def coins(size: int = 20_000, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    amounts = np.minimum(np.ceil(generator.lognormal(4.5, 1.4, size)), 3000.0)
    return np.where(generator.random(size) < 0.2, 0.0, amounts)


def test_ids_are_sos_values_eos_pad(tokenizer):
    ids = tokenizer.encode(np.array([0.0, 1.0, 75.0, 41.0]))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [
        [SOS, EOS, PAD, PAD, PAD],
        [SOS, 6, EOS, PAD, PAD],
        [SOS, 3, 4, 5, EOS],
        [SOS, 4, 4, 6, EOS],
    ]
    assert tokenizer.encode([0, 1], width=10).shape == (2, 10)
    assert (PAD, SOS, EOS) == (0, 1, 2)


def test_properties(tokenizer):
    assert tokenizer.size == 7
    assert tokenizer.max_length == 8
    assert tokenizer.min_unit == 1.0
    assert tokenizer.values.tolist() == [50.0, 20.0, 5.0, 1.0]
    assert tokenizer.token_values.tolist() == [0.0, 0.0, 0.0, 50.0, 20.0, 5.0, 1.0]
    assert tokenizer.values.dtype == tokenizer.token_values.dtype == np.float64
    for values in (tokenizer.values, tokenizer.token_values):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 3.0
    assert repr(tokenizer) == "IncentiveTokenizer(4 values, 50 to 1, max_length=8)"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_round_trip(amounts):
    tokenizer = IncentiveTokenizer([50.0, 20.0, 5.0, 1.0], max_length=16)
    for given_as in (
        np.array(amounts, np.float64),
        np.array(amounts, np.int64),
        torch.tensor(amounts).float(),
        amounts,
    ):
        ids = tokenizer.encode(given_as)
        assert tokenizer.decode(ids).tolist() == amounts
        assert np.allclose(tokenizer.token_values[ids.numpy()].sum(axis=1), amounts)


def test_decode_stops_at_eos_and_keeps_leading_dimensions(tokenizer):
    ids = torch.tensor([[[SOS, 3, EOS, 3], [3, 4, 5, 6]], [[EOS, 3, 3, 3], [SOS, PAD, 6, 6]]])
    assert tokenizer.decode(ids).tolist() == [[50.0, 76.0], [0.0, 2.0]]
    assert tokenizer.decode(ids).dtype == torch.float64
    assert tokenizer.decode(ids[0, 0]).item() == 50.0
    assert tokenizer.decode(torch.zeros((0, 5), dtype=torch.int64)).shape == (0,)
    assert tokenizer.decode([[SOS, 6, EOS]]).tolist() == [1.0]


def test_empty_batch(tokenizer):
    assert tokenizer.encode(np.zeros(0)).shape == (0, 2)


def test_fit_measures_what_it_fitted():
    amounts = coins()
    tokenizer = IncentiveTokenizer.fit(amounts)
    statistics = tokenizer.statistics
    assert tokenizer.values.tolist() == build_vocabulary(amounts).tolist()
    assert tokenizer.max_length == 16
    assert statistics.size == len(tokenizer.values) == tokenizer.size - 3
    assert statistics.amounts == len(amounts)
    assert statistics.zeros == (amounts == 0).sum() == statistics.length_counts[0]
    lengths = (tokenizer.encode(amounts) >= 3).sum(dim=1)
    assert statistics.mean_length == pytest.approx(lengths.double().mean().item())
    assert statistics.worst_length == lengths.max().item() == len(statistics.length_counts) - 1
    assert statistics.length_counts == tuple(torch.bincount(lengths).tolist())
    assert statistics.worst_error == statistics.worst_relative_error == 0.0
    assert f"{statistics.size} values" in str(statistics)


def test_fit_reports_the_worst_error():
    amounts = np.array([0.5, 10.25, 0.0, 99.0])
    statistics = IncentiveTokenizer.fit(amounts, min_unit=1.0, relative_error=0.01, max_tokens=2).statistics
    assert statistics.worst_error == 0.5
    assert statistics.worst_relative_error == 1.0


def test_fit_on_float32_reports_no_error_for_cents():
    amounts = (np.arange(0, 3000) / 100).astype(np.float32)
    tokenizer = IncentiveTokenizer.fit(amounts, min_unit=0.01)
    assert tokenizer.statistics.worst_error == 0.0
    assert np.array_equal(tokenizer.decode(tokenizer.encode(amounts)).numpy(), np.arange(0, 3000) / 100)


def test_fit_on_small_whole_amounts():
    tokenizer = IncentiveTokenizer.fit(torch.arange(11))
    assert tokenizer.size == 13
    assert tokenizer.statistics.worst_length == 1


def test_save_and_load(tmp_path):
    tokenizer = IncentiveTokenizer.fit(np.append(coins(2000), 0.37), max_length=9)
    path = tokenizer.save(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "vocabulary.json"
    assert [file.name for file in path.parent.iterdir()] == ["vocabulary.json"]
    loaded = IncentiveTokenizer.load(path.parent)
    assert loaded == tokenizer
    assert hash(loaded) == hash(tokenizer)
    assert loaded.values.tobytes() == tokenizer.values.tobytes()
    assert loaded.statistics == tokenizer.statistics
    assert loaded != IncentiveTokenizer(tokenizer.values, max_length=10)
    assert loaded != "vocabulary"
    bare = IncentiveTokenizer([2.0, 1.0])
    bare.save(tmp_path)
    assert IncentiveTokenizer.load(tmp_path).statistics is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 2, "values": [1.0], "max_length": 3, "statistics": null}',
        '{"format": 1, "values": [1.0, 2.0], "max_length": 3, "statistics": null}',
        '{"format": 1, "values": [1.0], "max_length": 3, "statistics": {"size": 1}}',
    ],
)
def test_load_refuses_what_is_no_vocabulary(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError):
        IncentiveTokenizer.load(tmp_path)


def test_load_refuses_a_missing_file(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read a vocabulary"):
        IncentiveTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "max_length"), [([1.0, 2.0], 4), ([], 4), ([1.0], 0), ([1.0], 2.5), ([float("nan")], 4), (["x"], 4)]
)
def test_constructor_refuses_bad_vocabularies(values, max_length):
    with pytest.raises(ConfigurationError):
        IncentiveTokenizer(values, max_length=max_length)


@pytest.mark.parametrize(
    ("amounts", "options", "message"),
    [
        (np.zeros(4), {}, "none above 0"),
        (np.zeros(0), {}, "none above 0"),
        (np.array([1.0, math.nan]), {}, r"values\[1\] is nan"),
        (np.array([1, 2], np.int32), {}, "int32"),
        (np.array([5.0]), {"min_unit": -1.0}, "min_unit"),
        (np.array([5.0]), {"max_length": 0}, "max_length"),
        (np.array([40.0, 2.0]), {"max_tokens": 1}, "2 amounts, such as 40.0, need more than max_length = 1"),
    ],
)
def test_fit_refuses(amounts, options, message):
    if options.get("max_tokens") == 1:
        options = {**options, "max_length": 1}
    with pytest.raises(ConfigurationError, match=message):
        IncentiveTokenizer.fit(amounts, **options)


def test_encode_and_decode_refuse(tokenizer):
    for bad in (np.array([-1.0]), np.array([np.inf]), np.array([5000.0]), np.array([[1.0]]), np.array(["1"])):
        with pytest.raises(ConfigurationError):
            tokenizer.encode(bad)
    with pytest.raises(ConfigurationError, match="width is 3, but these amounts need 4"):
        tokenizer.encode([21.0], width=3)
    with pytest.raises(ConfigurationError, match="ids holds 7, expected 0 to 6"):
        tokenizer.decode(torch.tensor([[SOS, 7]]))
    with pytest.raises(ConfigurationError, match="ids holds -1"):
        tokenizer.decode(torch.tensor([[SOS, -1]]))
    with pytest.raises(ConfigurationError, match="float32"):
        tokenizer.decode(torch.zeros(1, 3))
    assert issubclass(ConfigurationError, GoalError)


def write(path, amounts: np.ndarray | pa.Array, rows: int = 1500) -> None:
    pq.write_table(pa.table({"paid": amounts, "other": pa.nulls(len(amounts))}), path, row_group_size=rows)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32, np.float32])
def test_fit_parquet_equals_fit(tmp_path, dtype):
    amounts = coins(7000)
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "a.parquet", amounts[:4000].astype(dtype))
    write(tmp_path / "deeper" / "b.parquet", amounts[4000:].astype(dtype))
    expected = IncentiveTokenizer.fit(amounts)
    folder = IncentiveTokenizer.fit_parquet(tmp_path, "paid")
    assert folder == expected
    assert folder.statistics == expected.statistics
    single = IncentiveTokenizer.fit_parquet(tmp_path / "a.parquet", "paid")
    assert single == IncentiveTokenizer.fit(amounts[:4000])


def test_fit_parquet_on_float32_cents_and_decimals(tmp_path):
    cents = np.arange(1, 3000) / 100
    expected = IncentiveTokenizer.fit(cents, min_unit=0.01)
    write(tmp_path / "narrow.parquet", cents.astype(np.float32))
    write(tmp_path / "decimal.parquet", pa.array([f"{cent:.2f}" for cent in cents]).cast(pa.decimal128(10, 2)))
    for name in ("narrow", "decimal"):
        actual = IncentiveTokenizer.fit_parquet(tmp_path / f"{name}.parquet", "paid", min_unit=0.01)
        assert actual == expected
        assert actual.statistics == expected.statistics


def test_fit_parquet_measures_every_amount_where_it_is_not_exact(tmp_path, monkeypatch):
    monkeypatch.setattr("goal_kernels.vocabulary.accumulator.VocabularyAccumulator.exact", False)
    amounts = coins(3000)
    write(tmp_path / "log.parquet", amounts)
    assert IncentiveTokenizer.fit_parquet(tmp_path, "paid").statistics == IncentiveTokenizer.fit(amounts).statistics


def test_fit_parquet_refuses(tmp_path):
    with pytest.raises(LogError, match="the folder holds no file named"):
        IncentiveTokenizer.fit_parquet(tmp_path, "paid")
    with pytest.raises(LogError, match=r"absent\.parquet: no such file or folder"):
        IncentiveTokenizer.fit_parquet(tmp_path / "absent.parquet", "paid")
    (tmp_path / "log.csv").write_text("paid\n1\n")
    with pytest.raises(LogError, match=r"log\.csv: amounts are read from Parquet alone"):
        IncentiveTokenizer.fit_parquet(tmp_path / "log.csv", "paid")
    file = tmp_path / "log.parquet"
    write(file, np.array([1.0, 2.0]))
    with pytest.raises(LogError, match="no column 'amount', it has paid, other"):
        IncentiveTokenizer.fit_parquet(file, "amount")
    with pytest.raises(LogError, match="2 missing values"):
        IncentiveTokenizer.fit_parquet(file, "other")
    write(file, pa.array(["1", "2"]))
    with pytest.raises(LogError, match="type string, expected numbers"):
        IncentiveTokenizer.fit_parquet(file, "paid")
    write(file, np.array([1.0, -2.0]))
    with pytest.raises(ConfigurationError, match=r"values\[1\] is -2"):
        IncentiveTokenizer.fit_parquet(file, "paid")
    file.write_bytes(b"not parquet")
    with pytest.raises(LogError, match="cannot read"):
        IncentiveTokenizer.fit_parquet(file, "paid")


@pytest.mark.parametrize(
    ("name", "column"), [("complete_journey_baskets", "incentive_cents"), ("cdnow_purchases", "amount_cents")]
)
def test_real_logs_are_spelt_exactly(shared_data, name, column):
    tokenizer = IncentiveTokenizer.fit_parquet(shared_data / f"{name}.parquet", column)
    assert tokenizer.statistics.worst_error == 0.0
    assert tokenizer.statistics.mean_length < 4
    assert tokenizer.size < 64


def test_what_comes_back_from_its_tokens() -> None:
    tokenizer = IncentiveTokenizer([5.0, 1.0, 0.1])
    amounts = [0.0, 0.3, 0.1 + 0.2, float(np.float32(0.3)), 0.25, 5.09, 10.0]
    assert tokenizer.writes(amounts).tolist() == [True, True, True, True, False, False, True]
    assert tokenizer.writes([]).tolist() == []
