"""Whether a `graphs.json` is as `graph_document` makes it, as far as anything reads it.

Judged by a form: a type; [form] for a list of any length, {str: form} for a table of any keys, and a table with named
keys for one that has at least those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORDS = {str: "text", int: "a number", bool: "true or false", dict: "a table", list: "a list"}
_LARGEST = 1 << 63  # more of anything is no count

_SUM = {
    "operators": int,
    "views": int,
    "histogram": {str: int},
    "bytes": dict.fromkeys(("token", "constant", "other"), int),
}
_PLACE = {"pass": str, "node": str, "layers": [str]}
_NODE = {key: str for key in ("name", "op", "target", "args", "value", "layer", "where")} | {"inputs": [str]}
_GRAPH = {
    "number": int,
    "tokens": [int],
    "symbolic": bool,
    "pieces": [int],
    "passes": [{"name": str, "matched": int, "candidates": int}],
    "sites": [{**_PLACE, "operator": str, "feeds": [str], "added": [str], "removed": [str]}],
    "left": [{**_PLACE, "reason": str, "differs": [str]}],
    "stages": [{**_SUM, "after": str, "nodes": [int]}],
    "nodes": [_NODE],
}
_TOTAL = {
    "tokens": [int],
    "pieces": int,
    "sites": {str: {"matched": int, "candidates": int}},
    "before": _SUM,
    "after": _SUM,
}
_DOCUMENT = {
    "model": str,
    "arguments": [str],
    "startup_line": str,
    "settings": dict,
    "versions": dict,
    "faults": [str],
    "totals": [_TOTAL],
    "graphs": [_GRAPH],
}


def damage(content: Mapping[str, Any]) -> str | None:
    """The first thing that is not as it is written, in words; None if there is none. The totals are judged apart."""
    if found := _misfit(content, _DOCUMENT, ""):
        return found
    if not isinstance(content["settings"].get("kvcompile", {}), dict):
        return "settings.kvcompile is no table"
    for index, total in enumerate(content["totals"]):
        if len(total["tokens"]) != 2:
            return f"totals[{index}].tokens is no least and most"
    for index, graph in enumerate(content["graphs"]):
        if found := _inconsistent(graph):
            return f"graphs[{index}]{found}"
    return None


def _misfit(value: Any, form: Any, where: str) -> str | None:
    kind = form if isinstance(form, type) else type(form)
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or abs(value) >= _LARGEST)):
        return f"{where} is no {_WORDS[kind].removeprefix('a ')}"
    if isinstance(form, list):
        parts = [(item, form[0], f"{where}[{index}]") for index, item in enumerate(value)]
    elif isinstance(form, dict):
        inside = f"{where}." if where else ""
        if str in form:
            parts = [(item, form[str], f"{inside}{key}") for key, item in value.items()]
        else:
            if missing := [key for key in form if key not in value]:
                return f"{inside}{missing[0]} is missing"
            parts = [(value[key], of, f"{inside}{key}") for key, of in form.items()]
    else:
        return None
    return next(filter(None, (_misfit(*part) for part in parts)), None)


def _inconsistent(graph: Mapping[str, Any]) -> str | None:
    if len(graph["tokens"]) != 2:
        return ".tokens is no least and most"
    if not graph["stages"]:
        return " has no stages"
    for stage in graph["stages"]:
        if not all(0 <= index < len(graph["nodes"]) for index in stage["nodes"]):
            return " has a stage with a node that is not there"
    for entry in (*graph["sites"], *graph["left"]):
        if len(entry["layers"]) != len(graph["pieces"]):
            return f": {entry['node']} has not one layer per piece"
    return None
