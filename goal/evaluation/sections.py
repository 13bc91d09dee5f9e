"""What the report says: artefacts in, sections of plots, tables, facts and notes out.

The keys of the artefacts are those of `goal.evaluation.report.build`; how sections look is the template's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goal.evaluation import plots
from goal.evaluation.blocks import Block, Facts, Note, Plot, Section
from goal.evaluation.log_section import log_section
from goal.evaluation.metrics import is_gain_large
from goal.evaluation.tables import Column, Table, decimals, make_table, show, show_percent, show_whole


def sections(artefacts: Mapping[str, Any]) -> list[Section]:
    """All sections whose data is there, in reading order."""
    makers = (
        ("sweep", _control),
        ("sweep", _value),
        ("calibration", _calibration),
        ("amounts", _amounts),
        ("experts", _experts),
        ("log", log_section),
        ("metrics", _training),
        ("diagnostics", _diagnostics),
        ("tokenizer", _tokenizer),
        ("settings", _settings),
    )
    made = [make(artefacts) for key, make in makers if artefacts.get(key)]
    return [section for section in made if section is not None and section.blocks]


def _curve(artefacts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sweep with the chosen multiplier among it, as it was measured: the ring lies on the curve."""
    sweep, headline = list(artefacts["sweep"]), artefacts["headline"]
    if None in (headline["rev"], headline["cost"]) or any(row["multiplier"] == headline["multiplier"] for row in sweep):
        return sweep
    chosen = {"value": headline["rev"] - headline["multiplier"] * headline["cost"], **headline}
    return sorted([*sweep, chosen], key=lambda row: row["multiplier"])


def _control(artefacts: Mapping[str, Any]) -> Section:
    sweep, headline, curve = artefacts["sweep"], artefacts["headline"], _curve(artefacts)
    target, chosen = headline["roi_target"], headline["multiplier"]
    currency, points = _unit(artefacts, "currency"), artefacts.get("frontier") or {}
    tag = " All of it is estimated by the reward model, not observed." if headline.get("estimate") else ""
    blocks: list[Block] = [
        Plot(
            "cost",
            plots.over_multiplier(curve, "cost", f"cost ({currency})", chosen=chosen, error="cost_error"),
            "Cost per interaction. It should fall as the multiplier rises. The ring marks the chosen multiplier.",
        ),
        Plot(
            "revenue",
            plots.over_multiplier(curve, "rev", f"revenue ({currency})", chosen=chosen, error="rev_error"),
            "Revenue per interaction, which pays for the lower cost by falling too. Bands are two standard errors.",
        ),
        Plot(
            "roi",
            plots.roi_against_target(
                curve,
                target,
                chosen=chosen,
                calibration=artefacts.get("calibration"),
                kind=headline.get("roi_kind", "average"),
            ),
            "Revenue per unit of cost. Multipliers above the dashed line meet the target"
            + ("; the band is what calibration expects of new users." if artefacts.get("calibration") else "."),
        ),
        Plot(
            "violations",
            plots.over_multiplier(
                [{**row, "rvr": None if row["rvr"] is None else 100 * row["rvr"]} for row in curve],
                "rvr",
                "windows below target (%)",
                chosen=chosen,
            ),
            f"ROI violation rate: share of windows of {show_whole(headline['window'])} interactions, one every "
            f"{show_whole(headline['stride'])}, whose own ROI is below the target. Windows without cost count as met.",
        ),
        Plot(
            "frontier",
            plots.frontier(curve, points, target, chosen=chosen, currency=currency),
            "Every multiplier is one point of the trade between cost and revenue. Points in the shaded wedge miss the "
            "target."
            + (" The dotted line is the exact optimum, which knows each user's state." if points.get("oracle") else "")
            + (" Squares are the policies that the log comes from." if points.get("behaviour") else ""),
            wide=True,
        ),
        make_table(
            sweep,
            (
                Column("multiplier", "λ", digits=2),
                Column("rev", "revenue"),
                Column("cost", "cost"),
                Column("roi", "ROI", digits=2, absent="∞"),
                Column("incremental_roi", "incremental ROI", digits=2),
                Column("rvr", "violation rate", percent=True),
            ),
            f"Per interaction, in {currency}. Incremental ROI is what was gained over never paying per unit of cost.",
        ),
    ]
    return Section("control", "Turning the multiplier", "One policy, one number to turn." + tag, blocks)


def _value(artefacts: Mapping[str, Any]) -> Section | None:
    sweep, chosen = artefacts["sweep"], artefacts["headline"]["multiplier"]
    currency = _unit(artefacts, "currency")
    if all(row.get("oracle_value") is None for row in sweep):
        return None
    plot = Plot(
        "value",
        plots.value(sweep, chosen=chosen, currency=currency),
        "Value is revenue less λ times cost, per interaction. No policy can pass the oracle on average; the best "
        "constant amount, never paying included, is what needs no model at all.",
        wide=True,
    )
    rows = [dict(row) for row in sweep]
    for row in rows:
        oracle, reference = row.get("oracle_value"), row.get("reference_value")
        if oracle is not None and reference is not None and not is_gain_large(oracle=oracle, reference=reference):
            row["share_of_gain"] = None
    digits = decimals([row["oracle_value"] for row in rows])
    table = make_table(
        rows,
        (
            Column("multiplier", "λ", digits=2),
            Column("value", "policy", digits=digits),
            Column("oracle_value", "oracle", digits=digits),
            Column("reference_value", "best constant", digits=digits),
            Column("regret", "regret", digits=digits),
            Column("share_of_gain", "share of gain", percent=True),
        ),
        "Share of gain is (policy − constant) / (oracle − constant). It is left out where less than a tenth of the "
        "oracle's value is there to gain; regret, oracle − policy, always speaks.",
    )
    return Section(
        "value",
        "Against the best possible",
        "The simulator knows the exact optimum, so the distance to it can be told.",
        [plot, table],
    )


def _calibration(artefacts: Mapping[str, Any]) -> Section:
    calibration = artefacts["calibration"]
    kind = "ROI" if calibration["roi_kind"] == "average" else "incremental ROI"
    rows = [
        {
            **row,
            "low": row["intervals"]["roi"][0],
            "high": row["intervals"]["roi"][1],
            "meets": "yes" if row["meets"] else "no",
        }
        for row in calibration["evaluations"]
    ]
    table = make_table(
        rows,
        (
            Column("multiplier", "λ", digits=3),
            Column("revenue", "revenue"),
            Column("cost", "cost"),
            Column("roi", kind, digits=3, absent="∞"),
            Column("low", "new users, low", digits=3),
            Column("high", "new users, high", digits=3),
            Column("meets", "meets target"),
        ),
        "Every multiplier that the search evaluated on the calibration users, with the interval in which as much new "
        "traffic is expected.",
        emphasised={"multiplier": calibration["multiplier"]},
    )
    confidence = calibration.get("confidence")
    rule = (
        f"The smallest multiplier whose {kind} on the calibration users reaches {show(calibration['roi_target'], 2)}."
        if confidence is None
        else f"The smallest multiplier whose {kind} on new users reaches {show(calibration['roi_target'], 2)} with "
        f"confidence {show_percent(confidence, 0)}."
    )
    blocks: list[Block] = [table]
    message = calibration.get("message")
    # The page's head may have said it already.
    if message and message != artefacts["headline"].get("message"):
        blocks.insert(0, Note(message, warning=not calibration["feasible"]))
    return Section("calibration", "How the multiplier was chosen", rule, blocks)


def _amounts(artefacts: Mapping[str, Any]) -> Section:
    plot = Plot(
        "amounts",
        plots.amounts(artefacts["amounts"], _unit(artefacts, "incentive_unit")),
        "Share of interactions in per cent, by amount paid. Each column sums to 100; shares under 2 are not printed.",
        wide=True,
    )
    return Section("amounts", "What is paid", "How the same policy spends at each multiplier.", [plot])


def _experts(artefacts: Mapping[str, Any]) -> Section:
    plot = Plot(
        "experts",
        plots.experts(artefacts["experts"]),
        "Average routing of tokens to experts in per cent, by multiplier. Each column sums to 100; shares under 2 are "
        "not printed. Columns that differ mean that experts specialise by how tight the constraint is.",
        wide=True,
    )
    return Section(
        "experts", "Which experts decide", "The multiplier steers the gate of the decoder's experts.", [plot]
    )


def _training(artefacts: Mapping[str, Any]) -> Section:
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for line in artefacts["metrics"]:
        stages.setdefault(str(line["stage"]), []).append(line)
    blocks: list[Block] = []
    for stage, lines in stages.items():
        panels = plots.metric_panels(lines)
        shown = dict(list(panels.items())[: plots.MOST_PANELS])
        if not shown:
            continue
        name = stage.upper() if stage == "scpo" else stage.capitalize()
        caption = f"{name} over its steps."
        explained = (artefacts.get("metric_help") or {}).get(stage, {})
        caption += "".join(f" {key.replace('_', ' ')}: {explained[key]}." for key in shown if key in explained)
        if len(panels) > len(shown):
            caption += f" {len(panels) - len(shown)} more metrics are in metrics.jsonl."
        blocks.append(Plot(f"training_{_slug(stage)}", plots.training(lines, shown), caption, wide=True))
    return Section("training", "Training", "Each stage's own measures, averaged where there are many steps.", blocks)


def _diagnostics(artefacts: Mapping[str, Any]) -> Section:
    diagnostics, blocks = artefacts["diagnostics"], list[Block]()
    if items := diagnostics.get("reward_calibration"):
        blocks.append(
            Plot(
                "reward_calibration",
                plots.reward_calibration(items),
                "Events that the reward model did not learn from (of the calibration split, or of other simulated "
                "users) in bins of what it predicted, against what was observed, by objective. On the diagonal the "
                "prediction can be taken at its word.",
                wide=True,
            )
        )
    if rows := diagnostics.get("promises"):
        steps = "steps planned ahead" if diagnostics.get("planned") else "training step"
        blocks.append(
            Plot(
                "promises",
                plots.promises(rows, _unit(artefacts, "currency"), steps=steps),
                "What the value promised new users over an episode, discounted as it was learned, in the making (after "
                "so many steps of training, or looking so many steps of the episode ahead), and what its favourite "
                "amounts then brought them. Where the promise stays above, value is overestimated.",
                wide=True,
            )
        )
    if rows := diagnostics.get("ledger"):
        blocks.append(
            make_table(
                rows,
                (
                    Column("multiplier", "λ", digits=2),
                    Column("expected_value", "promised"),
                    Column("realised_value", "brought"),
                    Column("oracle_value", "oracle"),
                    Column("greedy_value", "greedy"),
                    Column("policy_value", "policy"),
                    Column("greedy_share", "greedy's share of gain", percent=True),
                    Column("policy_share", "policy's share of gain", percent=True),
                ),
                "Where value is lost. Promised is what the learned value expects of new users over an episode, "
                "discounted; brought is what paying its favourite amounts, greedily, brought them. Then value per "
                "interaction that the amounts bring in expectation: what the greedy ones miss of the oracle is lost in "
                "what was learned of the future, what the policy misses of the greedy ones in SCPO and generation.",
            )
        )
    return Section("reward", "The reward model", "SCPO can be no better than the rewards it is given.", blocks)


def _tokenizer(artefacts: Mapping[str, Any]) -> Section:
    tokenizer = artefacts["tokenizer"]
    facts = [
        ("tokens", show_whole(tokenizer["size"])),
        ("longest amount", f"{show_whole(tokenizer['max_length'])} tokens"),
        ("worst relative error", show_percent(tokenizer["worst_relative_error"], digits=2)),
    ]
    if tokenizer.get("mean_length") is not None:
        facts.insert(2, ("mean length", f"{show(tokenizer['mean_length'], 2)} tokens"))
    plot = Plot(
        "vocabulary",
        plots.vocabulary(tokenizer, _unit(artefacts, "incentive_unit")),
        "Left: what each token is worth. Right: how many tokens the logged amounts take, the end token not counted; an "
        "amount of 0 takes none.",
        wide=True,
    )
    return Section(
        "tokenizer", "Writing amounts as tokens", "An amount is the sum of a few token values.", [Facts(facts), plot]
    )


def _settings(artefacts: Mapping[str, Any]) -> Section:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in artefacts["settings"].items():
        if isinstance(value, Mapping):
            groups.setdefault(name, []).extend(_flatten(value))
        else:
            groups.setdefault("general", []).append((name, _text(value)))
    blocks = [
        Table(caption=group, header=("setting", "value"), rows=tuple(pairs), numeric=(False, False), emphasised=None)
        for group, pairs in groups.items()
        if pairs
    ]
    return Section("settings", "Settings", "Everything that this run was told.", blocks, folded=True)


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", _text(value)))
    return pairs


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    return str(value)


def _unit(artefacts: Mapping[str, Any], name: str) -> str:
    return artefacts["run"].get(name) or "units"


def _slug(text: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in text.lower())
