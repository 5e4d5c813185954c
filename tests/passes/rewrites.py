"""Passes that replace one function by another, and graphs of such functions, for tests of the pipeline."""

from __future__ import annotations

import torch
import torch.fx

from kvcompile.config import KVCompileConfig, to_dict
from kvcompile.passes.pipeline import PassResult

CONFIG = to_dict(KVCompileConfig())
STRICT = {**CONFIG, "strict": True}


class Rewrite:
    """A pass that turns every call of `seek` into `put`; every call of either is a candidate."""

    name = "rewrite"
    seek = torch.neg
    put = torch.abs

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        nodes = [n for n in graph.nodes if n.target in (self.seek, self.put)]
        matched = [n for n in nodes if n.target is self.seek]
        for node in matched:
            node.target = self.put
        return PassResult(self.name, len(matched), len(nodes))


class NormQuant(Rewrite):
    name = "norm_quant"


class SwigluQuant(Rewrite):
    name = "swiglu_quant"
    seek = torch.abs
    put = torch.exp


class Unlisted(Rewrite):
    """Its name is no key of the configuration."""

    name = "unlisted"


class Blind:
    """Every call of `neg` is a candidate; it never matches one."""

    name = "attention_swap"

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        return PassResult(self.name, 0, sum(n.target is torch.neg for n in graph.nodes))


def graph_of(*functions: object) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for function in functions:
        node = graph.call_function(function, (node,))
    graph.output(node)
    return graph


def targets(graph: torch.fx.Graph) -> list[object]:
    return [n.target for n in graph.nodes if n.op == "call_function"]
