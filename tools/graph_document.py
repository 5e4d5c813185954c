"""`graphs.json`, what `kvcompile graph-dump` writes and reads: its form, its totals, and reading it back.

    kind, schema       this is such a file, and of which form
    model, arguments   the command line
    startup_line, settings, versions, faults
    totals             per range of batch sizes: everything below, each graph times the pieces that share it
    graphs             in the order of compilation; of each
        tokens         batch sizes that it is compiled for; symbolic: whether the number of tokens is left open (T)
        pieces         numbers of the model's pieces that share it
        passes         matched and candidates of each pass
        sites          rewritten: pass, operator, node, layers (one per piece), feeds, added and removed nodes
        left           not rewritten: pass ("" if none is for it), node, layers, reason, the nodes that differ
        stages         the graph before the passes and after each: nodes (indices), operators, views, histogram, bytes
        nodes          every form of every node: name, target, args, inputs, value, layer, where, bytes

Nothing in it depends on the time or the folder: the same command gives the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError, shown
from kvcompile.tools.graph_damage import damage

KIND = "kvcompile graph-dump"
SCHEMA = 1
FILE = "graphs.json"

Document = dict[str, Any]


def document(
    model: str,
    arguments: Sequence[str],
    *,
    startup_line: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, Any],
    faults: Sequence[str],
    graphs: Sequence[Mapping[str, Any]],
) -> Document:
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "model": model,
        "arguments": list(arguments),
        "startup_line": startup_line,
        "settings": dict(settings),
        "versions": dict(versions),
        "faults": list(faults),
        "totals": totals(graphs),
        "graphs": list(graphs),
    }


def totals(graphs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each range of batch sizes what the whole model has, before the passes and after: graphs times pieces."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for graph in graphs:
        total = found.setdefault(
            tuple(graph["tokens"]),
            {"tokens": graph["tokens"], "pieces": 0, "sites": {}, "before": _nothing(), "after": _nothing()},
        )
        times = len(graph["pieces"])
        total["pieces"] += times
        for one in graph["passes"]:
            sites = total["sites"].setdefault(one["name"], {"matched": 0, "candidates": 0})
            for key in sites:
                sites[key] += one[key] * times
        _add(total["before"], graph["stages"][0], times)
        _add(total["after"], graph["stages"][-1], times)
    return list(found.values())


def matched(content: Mapping[str, Any]) -> int:
    """Sites that were rewritten in the whole model, over all ranges."""
    return sum(sites["matched"] for total in content["totals"] for sites in total["sites"].values())


def write(path: Path, content: Document) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Document:
    """A document of this version's form. Raises `UsageError` for anything else."""
    again = "give the graphs.json of a kvcompile graph-dump"
    try:
        if path.is_dir():
            path = path / FILE
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half a character, escaped, is JSON and cannot be shown
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; {again}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON ({' '.join(str(error).split())}); {again}") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise UsageError(f"{path} is JSON, but not of a kvcompile graph-dump; {again}")
    schema = content.get("schema")
    if type(schema) is not int or schema != SCHEMA:  # True == 1.0 == 1
        raise UsageError(
            f"{path} has schema {shown(schema)}; this kvcompile reads {SCHEMA}: dump that model again with it"
        )
    found = damage(content)
    if found is None and totals(content["graphs"]) != content["totals"]:
        found = "the totals are not those of its graphs"
    if found is not None:
        raise UsageError(f"{path} is damaged ({found}); dump that model again")
    return content


def _nothing() -> dict[str, Any]:
    return {"operators": 0, "views": 0, "histogram": {}, "bytes": {"token": 0, "constant": 0, "other": 0}}


def _add(into: dict[str, Any], stage: Mapping[str, Any], times: int) -> None:
    into["operators"] += stage["operators"] * times
    into["views"] += stage["views"] * times
    for part in ("histogram", "bytes"):
        for key, count in stage[part].items():
            into[part][key] = into[part].get(key, 0) + count * times
    into["histogram"] = dict(sorted(into["histogram"].items()))
