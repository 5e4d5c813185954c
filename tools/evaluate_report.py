"""What an evaluation found: tables on the console and as Markdown, a record, and a drawing against the budget."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.tools import evaluate_plot, evaluate_table, record
from kvcompile.tools.evaluate_state import Kept
from kvcompile.tools.evaluate_table import Rows

_FILES = {
    "json": "the record; answers so far are in FILE.state, and the same command goes on there",
    "markdown": "the tables",
    "plot": "quality against budget (SVG)",
}


class Table(NamedTuple):
    """The rows of `metric`. cases_down: a line per case and a column per system, for many cases."""

    title: str
    rows: Rows
    metric: str
    cases_down: bool = False


class Drawing(NamedTuple):
    """The rows of `metric`, from 0 to 1, whose cases are "PANEL, BUDGET"; `before` stands before a panel's name."""

    title: str
    rows: Rows
    metric: str
    before: str = "question "


def add_arguments(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    for name, what in _FILES.items():
        if plot or name != "plot":
            parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"also write {what}")


def check(args: argparse.Namespace) -> None:
    """Raise UsageError if a file that is asked for cannot be written."""
    record.check_targets({f"--{name}": getattr(args, name, None) for name in _FILES})


def publish(
    args: argparse.Namespace,
    name: str,
    rows: Sequence[dict[str, Any]],
    tables: Sequence[Table],
    drawing: Drawing | None = None,
    kept: Kept | None = None,
) -> None:
    """Print the tables, and write the files that are asked for; the record, called `name`, has all `rows`.

    kept: answers that a later run could have taken up, until the record is there.
    """
    for table in tables:
        for part in _parts(table):
            record.console().print(evaluate_table.console_table(*part))
    if args.markdown:
        record.write_text(args.markdown, "\n".join(evaluate_table.markdown(*table) for table in tables))
    if drawing is not None and args.plot:
        evaluate_plot.write(args.plot, *drawing)
    if args.json:
        made = record.record(name, record.command(), rows, ("transformers",))
        kept = kept or Kept()
        record.write(args.json, {**made, "taken_up_answers": kept.count})
        kept.done()


def _parts(table: Table) -> list[Table]:
    """One for each panel where the cases are columns: a console is only so wide."""
    if table.cases_down:
        return [table]
    panels = dict.fromkeys(row["case"].partition(",")[0] for row in table.rows)
    return [
        table._replace(rows=[row for row in table.rows if row["case"].partition(",")[0] == panel]) for panel in panels
    ]
