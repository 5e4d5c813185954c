"""Rows of means as tables: on a console and as Markdown. One table per metric, a line per system, a column per case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Rows = Sequence[dict[str, Any]]


def console_table(title: str, rows: Rows, metric: str) -> Table:
    systems, cases, cells = _cells(rows, metric)
    table = Table(title=title)
    table.add_column("system", no_wrap=True)
    for case in cases:
        table.add_column(case, justify="right")
    for system in systems:
        table.add_row(system, *(cells.get((case, system), "") for case in cases))
    return table


def markdown(title: str, rows: Rows, metric: str) -> str:
    systems, cases, cells = _cells(rows, metric)
    lines = [f"{title}", "", "| | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for system in systems:
        lines.append(f"| {system} | " + " | ".join(cells.get((case, system), "") for case in cases) + " |")
    return "\n".join(lines) + "\n"


def _cells(rows: Rows, metric: str) -> tuple[list[str], list[str], dict[tuple[str, str], str]]:
    """Systems, cases, and texts of "mean (low to high)", in the order of the rows."""
    shown = [row for row in rows if row["metric"] == metric]
    form = "+.3f" if metric.startswith("difference") else ".3f"
    cells = {
        (row["case"], row["system"]): f"{row['mean']:{form}} ({row['mean_low']:{form}} to {row['mean_high']:{form}})"
        for row in shown
    }
    systems, cases = (list(dict.fromkeys(row[name] for row in shown)) for name in ("system", "case"))
    return systems, cases, cells
