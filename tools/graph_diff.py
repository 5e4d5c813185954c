"""`kvcompile graph-dump --diff A B`: what differs between two dumps, of two vLLM versions or two configurations.

Compared is what a reader would act on: versions, flags and settings, sites by pass, operator and layer, what was left
and why, operators and bytes of the whole model. Names of nodes, which shift with anything in front of them, are not.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcompile.tools.graph_document import Document
from kvcompile.tools.graph_summary import change


class Difference(NamedTuple):
    """`a` and `b` in words; a count is an int, and what one of the two does not have is None."""

    part: str
    what: str
    a: str | int | None
    b: str | int | None


def differences(a: Document, b: Document) -> list[Difference]:
    """All differences, in the order of the parts: none if the two dumps say the same."""
    found = []
    for part, of in _PARTS.items():
        left, right = of(a), of(b)
        for key in [*left, *(key for key in right if key not in left)]:
            if left.get(key) != right.get(key):
                found.append(Difference(part, key, left.get(key), right.get(key)))
    return found


def show(console: Console, names: tuple[str, str], found: Iterable[Difference]) -> None:
    found = list(found)
    console.print(Text(f"A: {names[0]}\nB: {names[1]}"))
    if not found:
        console.print("Equal: the same sites, operators, bytes, settings and versions.")
        return
    for part in dict.fromkeys(difference.part for difference in found):
        table = Table(title=part, title_justify="left")
        counts = part in _COUNTS
        for name in ("", "A", "B", *(["change"] if counts else [])):
            table.add_column(name, justify="right" if counts and name else "left", overflow="fold")
        for _, what, a, b in (difference for difference in found if difference.part == part):
            if counts:
                table.add_row(Text(what), f"{a or 0:,}", f"{b or 0:,}", change(a or 0, b or 0))
            else:
                table.add_row(Text(what), *(Text("-" if value is None else str(value)) for value in (a, b)))
        console.print(table)


def _versions(content: Document) -> dict[str, Any]:
    return content["versions"]


def _flags(content: Document) -> dict[str, Any]:
    settings = {key: value for key, value in content["settings"].items() if key != "kvcompile"}
    ours = _flat(content["settings"].get("kvcompile", {}), "kvcompile.")
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in {**settings, **ours}.items()}
    return {
        "model": content["model"],
        "flags": shlex.join(content["arguments"]) or "none",
        **dict(sorted(shown.items())),
        "start-up line": content["startup_line"],
    }


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _sites(content: Document) -> dict[str, int]:
    return _counted(
        (graph, f"{site['pass']}: {site['operator']} at {layer}")
        for graph in content["graphs"]
        for site in graph["sites"]
        for layer in site["layers"]
    )


def _left(content: Document) -> dict[str, int]:
    return _counted(
        (graph, f"{entry['pass'] or 'no pass'}: {layer}: {_without_names(entry)}")
        for graph in content["graphs"]
        for entry in graph["left"]
        for layer in entry["layers"]
    )


def _without_names(entry: Mapping[str, Any]) -> str:
    reason = entry["reason"]
    for name in (entry["node"], *entry["differs"]):
        reason = reason.replace(name, "…")
    return reason


def _counted(entries: Iterable[tuple[Mapping[str, Any], str]]) -> dict[str, int]:
    return dict(Counter(f"{_range(graph)}{what}" for graph, what in entries))


def _faults(content: Document) -> dict[str, Any]:
    return dict(Counter(content["faults"]))


def _totals(content: Document) -> dict[str, int]:
    rows = {}
    for total in content["totals"]:
        for when in ("before", "after"):
            said = f"{_range(total)}{when}: "
            rows[f"{said}operators"] = total[when]["operators"]
            rows[f"{said}bytes per token"] = total[when]["bytes"]["token"]
            rows[f"{said}constant bytes"] = total[when]["bytes"]["constant"]
    return rows


def _histogram(content: Document) -> dict[str, int]:
    return {
        f"{_range(total)}{when}: {name}": count
        for total in content["totals"]
        for when in ("before", "after")
        for name, count in total[when]["histogram"].items()
    }


def _range(of: Mapping[str, Any]) -> str:
    return f"{of['tokens'][0]} to {of['tokens'][1]} tokens, "


_COUNTS = {"Operators and bytes": _totals, "Operators by name": _histogram}
_PARTS = {
    "Versions": _versions,
    "Flags and settings": _flags,
    "Sites": _sites,
    "Left as they are": _left,
    "Refused by a strict pass": _faults,
    **_COUNTS,
}
