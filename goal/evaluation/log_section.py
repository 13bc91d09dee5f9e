"""What the report says of a real log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goal.evaluation import plots
from goal.evaluation.blocks import Block, Facts, Note, Plot, Section
from goal.evaluation.tables import Column, make_table, show, show_percent, show_whole


def log_section(artefacts: Mapping[str, Any]) -> Section:
    """What the log was, what the policy learned of it, and what no log of this kind can tell."""
    log = artefacts["log"]
    currency = artefacts["run"].get("currency") or "units"
    facts = [("events", show_whole(log["events"])), ("users", show_whole(log["users"]))]
    facts += [(f"{name} events", show_whole(events)) for name, events in (log.get("splits") or {}).items()]
    blocks: list[Block] = [Facts(facts)]
    if not log["randomised"]:
        blocks.append(
            Note(
                "Lift is not identified. The schema names no propensity, the probability with which each amount was "
                "drawn, so amounts count as not assigned at random: users who were paid more may have differed from "
                "the start. No figure here says what paying more, or less, would cause.",
                warning=True,
            )
        )
    blocks += [Note(text) for text in log.get("notes") or ()]
    if log.get("accuracy"):
        names = list(log["accuracy"][0])
        blocks.append(
            make_table(
                log["accuracy"],
                [Column(name, name.replace("_", " ")) for name in names],
                "How well the amount that was really paid is foretold on held-out events. This tests the imitation of "
                "the logged policy, not whether its amounts were good.",
                emphasised={"predictor": "policy"},
            )
        )
    if log.get("windows"):
        windows = log["windows"]
        blocks += [
            Facts(
                [
                    ("logged policy's ROI", show(windows["roi"], 2)),
                    ("violation rate", show_percent(windows["rvr"])),
                    ("target", show(windows["target"], 2)),
                    ("window", show_whole(windows["window"])),
                    ("stride", show_whole(windows["stride"])),
                ]
            ),
            Plot(
                "logged_roi",
                plots.logged_roi(windows),
                f"ROI of the logged policy over windows of {show_whole(windows['window'])} interactions; shaded where "
                "it falls below the target.",
                wide=True,
            ),
        ]
    if log.get("estimate"):
        blocks.append(
            make_table(
                log["estimate"],
                (
                    Column("multiplier", "λ", digits=2),
                    Column("rev", "revenue (estimate)"),
                    Column("cost", "cost (estimate)"),
                    Column("roi", "ROI (estimate)", digits=2, absent="∞"),
                ),
                "Estimate: what the reward model expects of the policy's own amounts, with what the logged outcomes "
                f"were beyond its expectation, per interaction in {currency}. It carries every bias of the log and of "
                "the model.",
            )
        )
    blocks += _off_policy(log.get("off_policy") or {})
    return Section(
        "log",
        f"The log{': ' + log['name'] if log.get('name') else ''}",
        "What the recorded events can and cannot tell.",
        blocks,
    )


def _off_policy(evidence: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Note(text, warning=True) for text in evidence.get("warnings") or ()]
    if evidence.get("note"):
        blocks.append(Note(evidence["note"]))
    rows = [
        {**row, "low": row["revenue_interval"][0], "high": row["revenue_interval"][1]}
        for row in evidence.get("estimates") or ()
    ]
    if rows:
        columns = (
            Column("estimator", "estimator"),
            Column("horizon", "decisions"),
            Column("revenue", "revenue"),
            Column("low", "low"),
            Column("high", "high"),
            Column("cost", "cost"),
            Column("roi", "ROI", digits=2),
            Column("effective_size", "effective size", digits=0),
        )
        caption = (
            "Off-policy estimates at the chosen multiplier: what following the policy for so many decisions would "
            "bring per decision, from logged outcomes weighted by the propensities. Revenue with its "
            f"{show_percent(rows[0]['confidence'], 0)} interval; a dash where an estimator abstains."
        )
        blocks.append(make_table(rows, columns, caption))
        blocks += [Note(reason) for reason in dict.fromkeys(row["reason"] for row in rows if row["reason"])]
    return blocks
