"""What `kvcompile bench serve` found: rows of its record, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from kvcompile.tools import record
from kvcompile.tools.schedule_metrics import percentile
from kvcompile.tools.serve_memory import GIB
from kvcompile.tools.serve_run import Case
from kvcompile.tools.serve_state import Results

# Metric, unit, value of one run of a case.
_FIGURES: tuple[tuple[str, str, Callable[[Case, Mapping[str, Any]], float]], ...] = (
    ("output_throughput", "output tokens/s", lambda c, r: c.requests * c.output / r["seconds"]),
    ("total_throughput", "tokens/s", lambda c, r: c.requests * (c.prompt + c.output) / r["seconds"]),
    ("ttft_mean", "s", lambda c, r: statistics.mean(r["ttft"])),
    ("ttft_p50", "s", lambda c, r: percentile(r["ttft"], 0.5)),
    ("ttft_p99", "s", lambda c, r: percentile(r["ttft"], 0.99)),
    ("tpot_mean", "ms", lambda c, r: 1e3 * statistics.mean(r["tpot"])),
    ("tpot_p50", "ms", lambda c, r: 1e3 * percentile(r["tpot"], 0.5)),
    ("tpot_p99", "ms", lambda c, r: 1e3 * percentile(r["tpot"], 0.99)),
    ("preemptions", "requests", lambda c, r: r["preemptions"]),
    ("peak_blocks", "blocks of 16 tokens", lambda c, r: r["peak_blocks"]),
    ("peak_running", "requests", lambda c, r: r["peak_running"]),
)
# Of systems that prune: pruned tokens of a run, and what a request held when it ended.
_PRUNING = (("pruned_tokens", "tokens"), ("inline_prompts", "prompts"), ("resident_tokens", "tokens a request"))
_SECOND = "vllm-fp8"  # what a user of a GPU that has it would take instead: shares of it are shown too
_COLUMNS = ("case", "system", "output tokens/s", "TTFT s", "TPOT ms", "blocks", "at once", "preempted", "held")


def rows_of(cases: Sequence[Case], names: Sequence[str], results: Results) -> list[dict[str, Any]]:
    """The record's rows: memory of each system, then every figure of every case."""
    rows = []
    for name in names:
        facts = results.facts[name]
        rows.append(record.row("KV cache", name, "blocks", "blocks of 16 tokens", [facts["blocks"]]))
        for metric, key in (("weights", "weight_bytes"), ("kv", "kv_bytes"), ("allocated", "allocated_bytes")):
            rows.append(record.row("memory", name, metric, "GiB", [facts[key] / GIB]))
    for case in cases:
        for name in names:
            runs = results.of(case.name, name)
            for metric, unit, value in _FIGURES:
                rows.append(record.row(case.name, name, metric, unit, [value(case, run) for run in runs]))
            for metric, unit in _PRUNING:
                if metric in runs[0]:
                    rows.append(record.row(case.name, name, metric, unit, [run[metric] for run in runs]))
    return rows


def cells(cases: Sequence[Case], names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table: headings, then a line for each case and system."""
    by = {(row["case"], row["system"], row["metric"]): row for row in rows}
    bases = list(dict.fromkeys([names[0], *(name for name in names if name == _SECOND)]))
    lines = [[*_COLUMNS[:3], *(f"of {base}" for base in bases), *_COLUMNS[3:]]]
    for case in cases:
        for name in names:

            def median(metric: str, of: str = name, case: Case = case) -> float:
                return by[case.name, of, metric]["median"]

            rate = by[case.name, name, "output_throughput"]
            held = f"{median('resident_tokens'):,.0f}" if (case.name, name, "resident_tokens") in by else ""
            lines.append(
                [
                    case.name,
                    name,
                    f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
                    *(f"{rate['median'] / median('output_throughput', base):.2f}x" for base in bases),
                    f"{median('ttft_p50'):.3g}, {median('ttft_p99'):.3g}",
                    f"{median('tpot_p50'):.3g}, {median('tpot_p99'):.3g}",
                    *(f"{median(metric):,.0f}" for metric in ("peak_blocks", "peak_running", "preemptions")),
                    held,
                ]
            )
    return lines


def notes(cases: Sequence[Case], names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has to be said beside the table: memory, and where the first system had all the KV it could use."""
    by = {(row["case"], row["system"], row["metric"]): row["median"] for row in rows}
    parts = (
        f"{name} {by['memory', name, 'weights']:.2f} + {by['memory', name, 'kv']:.2f} GiB "
        f"({by['KV cache', name, 'blocks']:,} blocks)"
        for name in names
    )
    base = names[0]
    ample = [
        case.name
        for case in cases
        if by[case.name, base, "peak_running"] == case.requests and not by[case.name, base, "preemptions"]
    ]
    starved = f"{base} served all requests at once, without preemption, in: {', '.join(ample) or 'no case'}."
    return [
        "Output tokens a second: median (min to max) of the runs. TTFT and TPOT: p50, p99. blocks: most in use at a "
        "time; held: tokens of a request when it ended.",
        f"Weights + KV: {', '.join(parts)}.",
        starved,
    ]


def markdown(title: str, lines: Sequence[Sequence[str]], said: Sequence[str]) -> str:
    """The table and its notes as a Markdown text."""
    numbers = ["---" if column in _COLUMNS[:2] else "---:" for column in lines[0]]
    table = [f"| {' | '.join(line)} |" for line in (lines[0], numbers, *lines[1:])]
    return "\n".join([f"**{title}**", "", *table, "", *(f"- {each}" for each in said)]) + "\n"


def show(title: str, lines: Sequence[Sequence[str]], said: Sequence[str]) -> None:
    """Print the table and its notes."""
    table = Table(title=title, title_justify="left")
    for column in lines[0]:
        table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right", no_wrap=True)
    for line, after in zip(lines[1:], [*lines[2:], None], strict=True):
        table.add_row(*line, end_section=after is None or after[0] != line[0])
    console = record.console()
    console.width = max(console.width, 170)
    console.print(table)
    for each in said:
        console.print(each, markup=False)
