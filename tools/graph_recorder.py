"""Watches a compilation and turns it into the document that `kvcompile graph-dump` writes (see `graph_document`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx

from kvcompile.passes.result import PassResult
from kvcompile.tools import graph_sites
from kvcompile.tools.graph_node import module_path, record, token_symbol

_MANGLED = re.compile(r"^l_self_modules_(.+?)_(?:parameters|buffers)_(.+?)_*$")


@dataclass
class _Piece:
    """What Dynamo knows of a piece and the post-grad graph does not. `paths`: module of each node, in order."""

    number: int
    tokens: tuple[int, int]
    inputs: list[str]
    paths: list[str]


@dataclass
class _Graph:
    first: _Piece
    stages: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)  # ("" or the pass, nodes)
    results: list[PassResult] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    symbol: Any = None


class Recorder:
    """A `Watcher` of `kvcompile.integrations.vllm.watch`, and so an observer of the passes."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.startup_line = ""
        self.faults: list[str] = []
        self._root = ""  # what stands before paths below the compiled module, such as "model."
        self._graphs: list[_Graph] = []
        self._piece: _Piece | None = None

    def configured(self, settings: dict[str, Any], startup_line: str) -> None:
        self.settings, self.startup_line = settings, startup_line

    def piece(
        self, number: int, tokens: tuple[int, int], module: torch.fx.GraphModule, attention: Sequence[str]
    ) -> None:
        nodes = list(module.graph.nodes)
        self._root = self._root or _root(attention, filter(None, map(module_path, nodes)))
        inputs = [self._input(node.name) for node in nodes if node.op == "placeholder"]
        self._piece = _Piece(number, tokens, inputs, [module_path(node) or "" for node in nodes])

    def same_as(self, number: int, tokens: tuple[int, int]) -> None:
        graph = next(g for g in self._graphs if (g.first.number, g.first.tokens) == (number, tokens))
        if tokens == self._piece.tokens:
            graph.pieces.append(self._piece)
        else:  # of another range of batch sizes, whose totals are its own
            self._graphs.append(replace(graph, first=self._piece, pieces=[self._piece]))

    def fault(self, message: str) -> None:
        self.faults.append(message)

    def before(self, number: int, graph: torch.fx.Graph) -> None:
        self._graphs.append(_Graph(self._piece, pieces=[self._piece], symbol=token_symbol(graph.nodes)))
        self._keep("", graph)

    def after(self, name: str, graph: torch.fx.Graph, result: PassResult) -> None:
        self._graphs[-1].results.append(result)
        self._keep(name, graph)

    def graphs(self) -> list[dict[str, Any]]:
        """The graphs in the order in which they were compiled, plain values alone."""
        return [self._document(number, graph) for number, graph in enumerate(self._graphs, 1)]

    def _keep(self, name: str, graph: torch.fx.Graph) -> None:
        current = self._graphs[-1]
        nodes = [record(node, current.symbol, self._layer) for node in graph.nodes]
        given = [node for node in nodes if node["op"] == "placeholder"]
        if len(given) == len(current.first.inputs):
            for node, known in zip(given, current.first.inputs, strict=True):
                node["target"], node["layer"] = known, known.rpartition(".")[0]
        current.stages.append((name, nodes))

    def _layer(self, path: str) -> str:
        return f"{self._root}{path}" if path else self._root.rstrip(".")

    def _input(self, name: str) -> str:
        found = _MANGLED.match(name)
        return self._layer(f"{found[1].replace('_modules_', '.')}.{found[2]}") if found else name

    def _document(self, number: int, graph: _Graph) -> dict[str, Any]:
        pool: dict[str, int] = {}
        nodes: list[dict[str, Any]] = []
        stages = []
        for name, records in graph.stages:
            indices = []
            for item in records:
                # A node that a pass left as it was is one entry, however many stages it is in.
                index = pool.setdefault(repr(item), len(nodes))
                if index == len(nodes):
                    nodes.append(item)
                indices.append(index)
            stages.append({"after": name, "nodes": indices, **totals(records)})
        sites, others = [], []
        for (_, old), (name, new), result in zip(graph.stages, graph.stages[1:], graph.results, strict=False):
            sites += graph_sites.matched(name, old, new)
            others += graph_sites.refused(result.refused, name, old)
        others += graph_sites.left(graph.stages[-1][1], {other["node"] for other in others})
        for entry in (*sites, *others):
            layer = entry.pop("layer")
            entry["layers"] = [self._in_piece(layer, graph.first, piece) for piece in graph.pieces]
        low, high = graph.first.tokens
        return {
            "number": number,
            "tokens": [low, high],
            "symbolic": graph.symbol is not None,
            "pieces": [piece.number for piece in graph.pieces],
            "passes": [{"name": r.name, "matched": r.matched, "candidates": r.candidates} for r in graph.results],
            "sites": sites,
            "left": others,
            "stages": stages,
            "nodes": nodes,
        }

    def _in_piece(self, layer: str, first: _Piece, piece: _Piece) -> str:
        """The layer of `piece` that corresponds to `layer` of the first one: equal graphs have their nodes in step."""
        if piece is first or len(first.paths) != len(piece.paths):
            return layer
        path = layer.removeprefix(self._root)
        return next((self._layer(b) for a, b in zip(first.paths, piece.paths, strict=True) if a == path), layer)


def _root(attention: Iterable[str], paths: Iterable[str]) -> str:
    """ "model." where an attention layer is called "model.layers.0.self_attn.attn" and a path "layers.0"."""
    for path in paths:
        for name in attention:
            root, found, rest = name.partition(f"{path}.")
            if found and rest and (not root or root.endswith(".")):
                return root
    return ""


def totals(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"operators", "views", "histogram", "bytes"} of a graph. Elements of tuples and sizes are no operators."""
    histogram: dict[str, int] = {}
    moving = {"token": 0, "constant": 0, "other": 0}
    operators = views = 0
    for item in records:
        if item["op"] != "call" or item["target"] == "getitem" or "sym_size" in item["target"]:
            continue
        histogram[item["target"]] = histogram.get(item["target"], 0) + 1
        if item["bytes"] is None:
            views += 1
            continue
        operators += 1
        moving["other"] += "other" in item["bytes"]
        moving["token"] += item["bytes"].get("token", 0)
        moving["constant"] += item["bytes"].get("constant", 0)
    return {
        "operators": operators,
        "views": views,
        "histogram": dict(sorted(histogram.items())),
        "bytes": moving,
    }
