"""Rows of means as tables, on a console and as Markdown: one table per metric, systems down and cases across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Rows = Sequence[dict[str, Any]]


def console_table(title: str, rows: Rows, metric: str, cases_down: bool = False) -> Table:
    lines, columns, cells = _cells(rows, metric, cases_down)
    table = Table(title=title)
    table.add_column("case" if cases_down else "system", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(line, *(cells.get((line, column), "") for column in columns))
    return table


def markdown(title: str, rows: Rows, metric: str, cases_down: bool = False) -> str:
    lines, columns, cells = _cells(rows, metric, cases_down)
    text = [f"{title}", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for line in lines:
        text.append(f"| {line} | " + " | ".join(cells.get((line, column), "") for column in columns) + " |")
    return "\n".join(text) + "\n"


def _cells(rows: Rows, metric: str, cases_down: bool) -> tuple[list[str], list[str], dict[tuple[str, str], str]]:
    """Names of lines and of columns, and by both the texts of "mean (low to high)", in the order of the rows."""
    shown = [row for row in rows if row["metric"] == metric]
    form = "+.3f" if metric.startswith("difference") else ".3f"
    down, across = ("case", "system") if cases_down else ("system", "case")
    cells = {(row[down], row[across]): _cell(row, form) for row in shown}
    lines, columns = (list(dict.fromkeys(row[name] for row in shown)) for name in (down, across))
    return lines, columns, cells


def _cell(row: dict[str, Any], form: str) -> str:
    # One sample drawn again is itself, and an interval without width would look like certainty.
    spread = "one sample" if row["runs"] == 1 else f"{row['mean_low']:{form}} to {row['mean_high']:{form}}"
    return f"{row['mean']:{form}} ({spread})"
