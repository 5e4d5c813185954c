"""What a dump says in the terminal: the model's totals, the sites per pass, and what was left and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcompile.tools.graph_document import matched
from kvcompile.tools.graph_text import counted

MEANING = (
    "Bytes are the sum of what each operator reads and writes if it runs by itself, views free, attention not counted "
    "where it is between graphs. Inductor fuses pointwise neighbours further, so it is no measurement."
)


def show(console: Console, content: Mapping[str, Any]) -> None:
    # What comes from outside is Text: in a str rich looks for markup and for names of emoji.
    console.print(Text(content["startup_line"], "dim"))
    for total in content["totals"]:
        low, high = total["tokens"]
        rest = f", {counted(total['pieces'], 'piece')}, {batches(low, high)}"
        console.print(Text.assemble("\n", (content["model"], "bold"), rest))
        console.print(_graphs(content, total))
        console.print(_sums(total))
        if unknown := total["before"]["bytes"]["other"] + total["after"]["bytes"]["other"]:
            operators = counted(unknown, "operator")
            console.print(f"Not in the bytes: {operators} with sizes that are no multiple of the tokens.")
    for line in left(content):
        console.print(Text(line))
    for fault in content["faults"]:
        console.print(Text(f"The server would not start: {fault}", "red"))
    if not matched(content):
        console.print("No site matched: the passes leave this model as it is.", style="yellow")
    console.print(MEANING, style="dim")


def _graphs(content: Mapping[str, Any], total: Mapping[str, Any]) -> Table:
    names = list(total["sites"])
    table = Table(title="Sites rewritten, of candidates", title_justify="left")
    for name in ("graph", "pieces", *names, "operators"):
        table.add_column(Text(name), justify="left" if name == "graph" else "right")
    for graph in content["graphs"]:
        if graph["tokens"] != total["tokens"]:
            continue
        passes = {one["name"]: f"{one['matched']} of {one['candidates']}" for one in graph["passes"]}
        before, after = graph["stages"][0]["operators"], graph["stages"][-1]["operators"]
        sites = (passes.get(name, "") for name in names)
        table.add_row(str(graph["number"]), str(len(graph["pieces"])), *sites, f"{before} → {after}")
    sums = (f"{s['matched']} of {s['candidates']}" for s in total["sites"].values())
    operators = f"{total['before']['operators']} → {total['after']['operators']}"
    table.add_section()
    table.add_row("model", str(total["pieces"]), *sums, operators)
    return table


def _sums(total: Mapping[str, Any]) -> Table:
    before, after = total["before"], total["after"]
    table = Table(title="The whole model", title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    rows = [
        ("operators", before["operators"], after["operators"]),
        ("bytes per token", before["bytes"]["token"], after["bytes"]["token"]),
        ("constant bytes", before["bytes"]["constant"], after["bytes"]["constant"]),
    ]
    names = sorted(before["histogram"].keys() | after["histogram"].keys())
    counts = [(name, before["histogram"].get(name, 0), after["histogram"].get(name, 0)) for name in names]
    rows += [row for row in counts if row[1] != row[2]]
    for index, (name, old, new) in enumerate(rows):
        if index == 3:
            table.add_section()
        table.add_row(Text(name), f"{old:,}", f"{new:,}", change(old, new))
    return table


def batches(low: int, high: int) -> str:
    if low == high:
        return f"batches of {counted(low, 'token')} alone: their bytes are all constant"
    return f"batches of {low} to {high} tokens"


def change(old: int, new: int) -> str:
    """The difference with its sign, and in per cent where that says something."""
    if old == new:
        return "same"
    share = f" ({100 * (new - old) / old:+.1f} %)" if old and new else ""
    return f"{new - old:+,}{share}"


def left(content: Mapping[str, Any]) -> list[str]:
    """One line per reason for which sites were left as they are."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for graph in content["graphs"]:
        for entry in graph["left"]:
            reasons.setdefault((entry["pass"], entry["reason"]), []).extend(entry["layers"])
    lines = []
    for (name, reason), layers in reasons.items():
        layers = list(dict.fromkeys(layers))  # also of another range of batch sizes
        where = layers[0] if len(layers) == 1 else f"{len(layers)} sites, {layers[0]} to {layers[-1]}"
        lines.append(f"Left as it is{f' by {name}' if name else ''}: {where}: {reason}")
    return lines
