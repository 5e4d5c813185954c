"""Which sites a pass rewrote, found by comparing the graph before it with the graph after; and those that it left.

A pass counts its matches but does not say where they were. Nodes that it put in are the site's new ones; what they
took the place of follows from who reads them: a node of both graphs that read a removed one before reads a new one now.

    before   norm ── quantiser ── linear          removed: norm, quantiser
    after    norm_quant ───────── linear          added: norm_quant, in the place of the quantiser

From there the removed nodes are collected upwards. Sites are taken in the order of the graph, so that what one of them
has in common with an earlier one, the residual, stays with the earlier.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = dict[str, Any]  # of `graph_node.record`

QUANTISER = "kvcompile.quant_per_token"


def matched(pass_name: str, before: Sequence[Record], after: Sequence[Record]) -> list[dict[str, Any]]:
    """{"pass", "node", "operator", "layer", "feeds", "added", "removed"} of each rewritten site, in graph order."""
    old, new = _by_name(before), _by_name(after)
    gone = [name for name in old if name not in new]
    made = [name for name in new if name not in old]
    changed = [name for name in new if name in old and new[name]["target"] != old[name]["target"]]
    sites = {name: _site(pass_name, new[name]) for name in new if name in changed or _is_operator(name, new, made)}
    for name in made:
        owner = _owner(name, new, sites)
        if owner is not None and name not in sites[owner]["added"]:
            sites[owner]["added"].append(name)
    replaced = _replaced(old, new)
    claimed: dict[str, str] = {}
    for site in sites:
        pending = [was for was, now in replaced if _owner(now, new, sites) == site]
        while pending:
            name = pending.pop()
            if name in new or name in claimed:
                continue
            # An element of a tuple goes with what gives the tuple.
            source = old[name]["inputs"][0] if old[name]["target"] == "getitem" else None
            claimed[name] = claimed.get(source, site)
            pending += old[name]["inputs"]
    for name in gone:
        # What nobody reads any more once the others have gone: with the one that it was computed from.
        owner = claimed.get(name) or next((claimed[i] for i in old[name]["inputs"] if i in claimed), None)
        if owner is not None:
            claimed[name] = owner
            sites[owner]["removed"].append(name)
    for site in sites.values():
        _place(site, old, new)
    return list(sites.values())


def refused(reasons: Iterable[str], pass_name: str, records: Sequence[Record]) -> list[dict[str, Any]]:
    """{"pass", "node", "layer", "reason", "differs"} of each "node: why" of a PassResult.

    `differs`: the nodes that the reason names, else what computes the quantised tensor.
    """
    nodes, found = _by_name(records), []
    for text in reasons:
        name, _, reason = text.partition(": ")
        named = [word for word in re.findall(r"\w+", reason) if word in nodes and word != name]
        source = _source(name, nodes) if name in nodes else None
        differs = list(dict.fromkeys(named)) or ([source] if source else [])
        layer = nodes[name]["layer"] if name in nodes else ""
        found.append({"pass": pass_name, "node": name, "layer": layer, "reason": reason, "differs": differs})
    return found


def left(records: Sequence[Record], known: Iterable[str]) -> list[dict[str, Any]]:
    """Quantisers that are still there and that no pass has said anything of: `known` are those that one has."""
    nodes, known = _by_name(records), set(known)
    found = []
    for name, node in nodes.items():
        if node["target"] == QUANTISER and name not in known:
            source = _source(name, nodes)
            what = nodes[source]
            made = "an input of the graph" if what["op"] == "placeholder" else what["target"]
            reason = f"no pass is for what it quantises: {made}"
            found.append({"pass": "", "node": name, "layer": node["layer"], "reason": reason, "differs": [source]})
    return found


def _by_name(records: Sequence[Record]) -> dict[str, Record]:
    return {record["name"]: record for record in records}


def _site(pass_name: str, node: Record) -> dict[str, Any]:
    site = {"pass": pass_name, "node": node["name"], "operator": node["target"], "layer": node["layer"], "feeds": []}
    return {**site, "added": [node["name"]], "removed": []}


def _is_operator(name: str, new: Mapping[str, Record], made: Sequence[str]) -> bool:
    return name in made and new[name]["bytes"] is not None


def _owner(name: str, new: Mapping[str, Record], sites: Mapping[str, Any]) -> str | None:
    """The site whose operator gives node `name`, as it is or through elements and views."""
    while name not in sites:
        node = new.get(name)
        if node is None or node["bytes"] is not None or not node["inputs"]:
            return None
        name = node["inputs"][0]
    return name


def _replaced(old: Mapping[str, Record], new: Mapping[str, Record]) -> list[tuple[str, str]]:
    """(removed node, the one that is read in its place) for each argument of a node in both graphs."""
    pairs = []
    for name, node in new.items():
        if name in old and len(old[name]["inputs"]) == len(node["inputs"]):
            both = zip(old[name]["inputs"], node["inputs"], strict=True)
            pairs += [(was, now) for was, now in both if was not in new and now not in old]
    return pairs


def _place(site: dict[str, Any], old: Mapping[str, Record], new: Mapping[str, Record]) -> None:
    """Where in the model the site is: the layer that computes what is replaced, and the layers that read the result."""
    layers = [old[gone]["layer"] for gone in site["removed"] if old[gone]["bytes"] is not None and old[gone]["layer"]]
    site["layer"] = next(iter(layers), site["layer"])
    gives, layers = set(site["added"]), []
    for node in new.values():
        if node["name"] in gives or not gives & set(node["inputs"]):
            continue
        if node["op"] == "call" and node["bytes"] is None:
            gives.add(node["name"])  # a view or an element: who reads that
        elif node["layer"]:
            layers.append(node["layer"])
    site["feeds"] = list(dict.fromkeys(layers))


def _source(name: str, nodes: Mapping[str, Record]) -> str:
    """What computes the first argument of `name`, behind views and elements of tuples."""
    inputs = nodes[name]["inputs"]
    while inputs:
        name = inputs[0]
        free = nodes[name]["op"] == "call" and nodes[name]["bytes"] is None
        inputs = nodes[name]["inputs"] if free else []
    return name
