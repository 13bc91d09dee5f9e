"""The report: a well-formed page that holds what it was given and needs nothing else."""

from __future__ import annotations

import copy
import inspect
import math
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

from goal.constraint import calibrate
from goal.errors import ConfigurationError
from goal.evaluation import canvas, plots, report
from goal.evaluation.plots import metric_panels
from goal.evaluation.tables import Column, decimals, make_table, show, show_percent

VOID = {"meta", "link", "br", "img", "hr", "input"}
SECTIONS = {
    "control",
    "value",
    "calibration",
    "amounts",
    "experts",
    "log",
    "training",
    "reward",
    "tokenizer",
    "settings",
}


class Page(HTMLParser):
    """Collects ids, links, text and tables, and checks that tags close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        if values.get("id"):
            self.ids.append(values["id"])
        self.links += [values[name] for name in ("href", "xlink:href", "src") if values.get(name)]
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.words.append(data)
        if self.stack and self.stack[-1] in ("td", "th"):
            self.rows[-1].append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def minimal() -> dict:
    return {
        "run": {"source": "environment calibrated", "seed": 0, "device": "cpu", "wall_seconds": 61.0},
        "headline": {
            "roi_target": 3.0,
            "multiplier": 2.0,
            "feasible": True,
            "roi": 3.112,
            "rev": 12.31,
            "cost": 3.956,
            "rvr": 0.256,
            "window": 1000,
            "stride": 250,
        },
    }


def full() -> dict:
    multipliers = [0.0, 1.0, 2.0, 3.0]
    rows = [
        {
            "multiplier": x,
            "rev": 16.0 - 3 * x,
            "cost": 7.0 - 2 * x,
            "roi": (16.0 - 3 * x) / (7.0 - 2 * x),
            "rvr": 0.9 - 0.3 * x,
            "value": 16.0 - 3 * x - x * (7.0 - 2 * x),
            "oracle_value": 17.0 - 5 * x,
            "reference_value": 11.0 - 4 * x,
            "share_of_gain": 0.9,
            "regret": 0.5,
            "incremental_roi": 2.0,
            "rev_error": 0.1,
            "cost_error": 0.1,
        }
        for x in multipliers
    ]
    # Nothing paid at all: no ROI.
    rows.append(
        {**rows[-1], "multiplier": 4.0, "cost": 0.0, "roi": None, "incremental_roi": None, "rvr": np.float64(0)}
    )

    def evaluate(multiplier: float):
        cost = np.full(50, max(4.0 - multiplier, 0.0))
        return 6.0 * np.sqrt(cost), cost

    calibration = calibrate(evaluate, (0.0, 2.0, 4.0), roi_target=3.0, confidence=0.9).to_dict()
    return minimal() | {
        "settings": {"seed": 0, "policy": {"window": 16, "encoder": {"dilations": (1, 2)}}, "scpo": {"kl": None}},
        "sweep": rows,
        "frontier": {
            "oracle": [{"multiplier": x, "rev": 17 - 3 * x, "cost": 7 - 2 * x} for x in multipliers],
            "behaviour": [{"name": "greedy", "rev": 11.0, "cost": 10.0}],
            "constants": [{"amount": 5.0, "rev": 9.0, "cost": 5.0}],
        },
        "calibration": calibration,
        "amounts": {"multipliers": multipliers, "amounts": ["0", "1–5"], "share": np.full((4, 2), 0.5)},
        "experts": {"multipliers": multipliers, "usage": np.eye(4)},
        "metrics": [{"stage": s, "step": i, "loss": 1 / (i + 1)} for s in ("pretraining", "scpo") for i in range(400)],
        "metric_help": {"pretraining": {"loss": "the weighted likelihood"}},
        "tokenizer": {
            "size": 8,
            "max_length": 2,
            "worst_relative_error": 0.0123,
            "values": np.array([100.0, 10.0, 1.0]),
            "lengths": [0.2, 0.5, 0.3],
            "mean_length": 1.1,
        },
        "log": {
            "name": "baskets.parquet",
            "events": 123456,
            "users": 789,
            "randomised": False,
            "splits": {"training": 100000},
            "accuracy": [
                {"predictor": "policy", "exact": 0.61, "error": 71.0},
                {"predictor": "user mean", "exact": 0.1},
            ],
            "windows": {
                "target": 5.5,
                "window": 1000,
                "stride": 250,
                "roi": 5.8,
                "rvr": 0.34,
                "window_roi": np.array([5.0, 6.0, np.inf, 5.7]),
            },
            "estimate": [{"multiplier": 1.0, "rev": 1000.0, "cost": 200.0, "roi": 5.0}],
            "notes": ["The log ends in week 53."],
        },
        "diagnostics": {
            "reward_calibration": [{"objective": "engaged", "predicted": [0.1, 0.2], "observed": [0.1, 0.3]}]
        },
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = report.build(full(), tmp_path_factory.mktemp("report"))
    text = path.read_text(encoding="utf-8")
    return path, text, Page(text)


def test_every_section_is_there_and_linked(built):
    _, _, page = built
    assert {f"section-{name}" for name in SECTIONS} <= set(page.ids)
    assert {f"#section-{name}" for name in SECTIONS} <= set(page.links)


def test_the_page_stands_alone(built):
    _, text, page = built
    assert len(page.ids) == len(set(page.ids))
    # Only links into the page, and the namespaces of SVG, which are names and not addresses.
    assert all(link.startswith("#") for link in page.links)
    assert all(link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text and "url(http" not in text


def test_plots_follow_the_theme_of_the_page(built):
    _, text, page = built
    drawings = text[text.index("<svg") :]
    assert page.tags.count("svg") == 13
    assert not any(color in drawings for color in canvas.VARIABLES)
    assert text.count('role="img" aria-label=') == 13


def test_plots_are_written_as_png_too(built):
    path, _, _ = built
    files = sorted((path.parent / "plots").glob("*"))
    expected = (
        "amounts cost experts frontier logged_roi revenue reward_calibration roi training_pretraining training_scpo"
    )
    assert [file.stem for file in files] == [*expected.split(), "value", "violations", "vocabulary"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert not list(path.parent.glob("*.partial"))


def test_numbers_and_warnings_are_printed(built):
    _, _, page = built
    for expected in (
        "Serve with λ = 2. ROI 3.11 on the test traffic, target 3.00.",
        "25.6%",
        "window 1,000, stride 250",
        "Lift is not identified.",
        "The log ends in week 53.",
        "123,456",
        "Estimate: what the reward model expects of the policy's own amounts",
        "loss: the weighted likelihood",
        "1.23%",
    ):
        assert expected in page.text, expected
    assert ["policy", "0.610", "71"] in page.rows
    assert ["user mean", "0.100", "–"] in page.rows
    assert ["4.00", "7", "0", "∞", "–", "0.0%"] in page.rows
    assert ["encoder.dilations", "1, 2"] in page.rows
    assert "nan" not in page.text.lower().split()
    assert "None" not in page.text


def test_sections_without_data_are_left_out(tmp_path):
    page = Page(report.build(minimal() | {"sweep": None, "log": None}, tmp_path).read_text(encoding="utf-8"))
    assert not [name for name in page.ids if name.startswith("section-")]
    assert list((tmp_path / "plots").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "label", "sentence"),
    [
        ({}, "target met", "Serve with"),
        ({"roi": 2.9}, "target missed", "misses it here"),
        ({"feasible": False, "message": "No multiplier meets it."}, "target not feasible", "No multiplier meets it."),
        ({"roi": math.inf}, "target met", "Nothing is paid."),
        ({"estimate": True}, "estimate by the reward model", "ROI (estimate)"),
        ({"roi_interval": (3.0, 3.2), "confidence": 0.95}, "target met", "predicted 3.00 to 3.20 (90%)"),
        ({"oracle_rvr": 0.417}, "violation rate", "the oracle's at this ROI 41.7%"),
        ({"best_rev": 13.17}, "share of best revenue", "93.5%"),
        ({"never_pay_rev": 1.423, "incremental_roi": 2.75}, "revenue if never paying", "1.423"),
    ],
)
def test_the_verdict(tmp_path, change: dict, label: str, sentence: str):
    artefacts = minimal()
    artefacts["headline"] |= change
    text = Page(report.build(artefacts, tmp_path).read_text(encoding="utf-8")).text
    assert label in text
    assert sentence in text


def test_text_from_outside_is_escaped(tmp_path):
    artefacts = minimal()
    artefacts["run"]["source"] = "log <script>alert(1)</script>.parquet"
    artefacts["settings"] = {"<b>": "a & b"}
    artefacts["experts"] = {"multipliers": [0.0], "usage": [[1.0]]}
    text = report.build(artefacts, tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in text and "<b>&lt;" not in text.replace("<b>log", "")
    assert "log <script>alert(1)</script>.parquet" in Page(text).text


def test_building_twice_gives_the_same_page_and_leaves_the_artefacts_alone(tmp_path):
    artefacts = minimal() | {"experts": {"multipliers": [0.0, 1.0], "usage": np.array([[0.3, 0.7], [0.6, 0.4]])}}
    before = copy.deepcopy(artefacts)
    first = report.build(artefacts, tmp_path / "a").read_bytes()
    assert report.build(artefacts, tmp_path / "b").read_bytes() == first
    assert str(artefacts) == str(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweeps": []}, "unknown keys"),
        ({"run": None}, "'run'"),
        ({"headline": {"roi": 1.0}}, "'headline'.*lacks"),
    ],
)
def test_wrong_artefacts_are_named(tmp_path, change: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        report.build(minimal() | change, tmp_path)


def test_numbers_as_text():
    assert show(None) == show(math.nan) == "–"
    assert show(math.inf) == "∞"
    assert show(-1234.5, 1) == "−1,234.5"
    assert [decimals(values) for values in ([16.645, 1.0], [0.613], [1234.5], [1.0, 20.0], [0.0123])] == [2, 3, 0, 0, 4]
    assert show_percent(0.2564) == "25.6%"
    assert show_percent(None) == "–"
    table = make_table([{"a": 1.5, "b": None}, {"a": 20.0, "b": None}], (Column("a", "A"), Column("b", "B")), "")
    assert table.header == ("A",)
    assert table.rows == (("1.50",), ("20.00",))


def test_metrics_that_make_no_curve_are_not_drawn():
    lines = [{"stage": "s", "step": i, "loss": 1.0, "name": "x", "flag": True} for i in range(3)]
    lines.append({"stage": "s", "step": 4, "once": 1.0, "bad": math.nan})
    assert metric_panels(lines) == {"loss": ["loss"]}


def test_metrics_of_every_multiplier_share_a_panel():
    lines = [{"stage": "scpo", "step": i, "amount@0": 1.0, "kl": 0.1, "amount@0.5": 2.0} for i in range(3)]
    assert metric_panels(lines) == {"amount": ["amount@0", "amount@0.5"], "kl": ["kl"]}
    figure = plots.training(lines, metric_panels(lines))
    assert [len(axis.lines) for axis in figure.axes] == [2, 1]


def test_drawing_touches_no_global_state():
    settings = dict(matplotlib.rcParams)
    figure, (axis,) = canvas.new_figure()
    axis.plot([0, 1], [0, 1], color=canvas.POLICY)
    svg = canvas.to_svg(figure, "name", 'a "quoted" & <odd> description')
    assert "var(--policy)" in svg
    assert dict(matplotlib.rcParams) == settings
    assert not any("pyplot" in line for line in inspect.getsource(canvas).splitlines() if "import" in line)


def test_off_policy_evidence_is_printed(tmp_path):
    row = {"estimator": "doubly robust", "horizon": 1, "effective_size": 412.3, "confidence": 0.9, "reason": None,
           "revenue": 2.5, "cost": 0.5, "roi": 5.0, "revenue_interval": [2.1, 3.4]}  # fmt: skip
    absent = {"revenue": None, "cost": None, "roi": None, "revenue_interval": [None, None]}
    evidence = {
        "warnings": ["This log is confounded: both shares."],
        "note": None,
        "estimates": [row, row | absent | {"horizon": 5, "effective_size": 1.0, "reason": "Too few."}],
    }
    log = {"events": 10, "users": 2, "randomised": True, "off_policy": evidence}
    page = Page(report.build(minimal() | {"log": log}, tmp_path).read_text(encoding="utf-8"))
    assert "This log is confounded: both shares." in page.text and "Too few." in page.text
    assert ["doubly robust", "1", "2.500", "2.100", "3.400", "0.500", "5.00", "412"] in page.rows
    assert ["doubly robust", "5", "–", "–", "–", "–", "–", "1"] in page.rows
    log["off_policy"] = {"warnings": [], "note": "There are no off-policy estimates.", "estimates": []}
    page = Page(report.build(minimal() | {"log": log}, tmp_path).read_text(encoding="utf-8"))
    assert "There are no off-policy estimates." in page.text
