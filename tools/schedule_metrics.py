"""What serving a trace is summed up to: preemptions, work done twice, throughput, waits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvcompile.tools import record

# Metric, unit, heading of the column, decimals.
METRICS = (
    ("preemptions", "requests", "preempted", 0),
    ("recomputed_tokens", "tokens", "recomputed", 0),
    ("output_throughput", "tokens/s", "output", 0),
    ("ttft_mean", "s", "TTFT mean", 2),
    ("ttft_p99", "s", "TTFT p99", 2),
    ("worst_wait", "s", "TTFT worst", 2),
    ("tpot_p50", "ms", "TPOT p50", 2),
    ("tpot_p99", "ms", "TPOT p99", 2),
    ("blocks_used", "% of pool", "blocks, mean", 1),
    ("most_passed", "batches", "most passed", 0),
)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measures(outcome: Any) -> dict[str, float]:
    """Metric -> value of one trace that has been served."""
    waits = [life.first_token_s - life.arrival.time_s for life in outcome.lives if life.first_token_s is not None]
    gaps = [(life.end_s - life.first_token_s) / (life.tokens - 1) for life in outcome.lives if life.tokens > 1]
    begins = [0.0, *(time_s for time_s, _ in outcome.blocks_used)]
    # A count holds until the next step ends.
    block_seconds = sum(used * (end - begin) for (end, used), begin in zip(outcome.blocks_used, begins, strict=False))
    return {
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed_tokens,
        "output_throughput": sum(life.tokens for life in outcome.lives) / outcome.seconds,
        "ttft_mean": statistics.mean(waits),
        "ttft_p99": percentile(waits, 0.99),
        "worst_wait": max(waits),
        "tpot_p50": 1e3 * percentile(gaps, 0.5) if gaps else 0.0,
        "tpot_p99": 1e3 * percentile(gaps, 0.99) if gaps else 0.0,
        "blocks_used": 100 * block_seconds / (outcome.seconds * outcome.usable_blocks),
        "most_passed": outcome.most_passed,
    }


def rows_of(case: str, system: str, each: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row per metric, over the `measures` of each run of a case."""
    return [record.row(case, system, metric, unit, [m[metric] for m in each]) for metric, unit, _, _ in METRICS]


def show(title: str, case: str, systems: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the rows of this case: a line per metric, a column per system."""
    table = Table(title=f"{title}: median (min to max)", title_justify="left")
    table.add_column("")
    for system in systems:
        table.add_column(system, justify="right")
    by = {(row["metric"], row["system"]): row for row in rows if row["case"] == case}
    for metric, unit, heading, digits in METRICS:
        found = (by[metric, system] for system in systems)
        spread = (f"{r['median']:,.{digits}f} ({r['min']:,.{digits}f} to {r['max']:,.{digits}f})" for r in found)
        table.add_row(f"{heading}, {unit}", *spread)
    record.console().print(table)
