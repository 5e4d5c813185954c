r"""vLLM's attention operator becomes kvcompile's, which has the same arguments and writes the same output.

before                                                      after

    query  key  value  output  layer_name                       query  key  value  output  layer_name
        \    \    |     /     /                                     \    \    |     /     /
    auto_functionalized(                                        auto_functionalized(
        vllm.unified_attention_with_output)                         kvcompile.pruned_kv8_attention)
        |[1]                                                        |[1]
    output, written                                             output, written

and the same where it is called as it is, not functionalised. Nothing but the operator changes: every argument, also
those that vLLM has put there (a cache update to wait for, the scale of a quantised output), and everything that is
recorded about the node hold for the one as for the other, because their schemas are the same. That is verified.

Candidates are all nodes that call, or hand to another operator, the source operator in any overload, or an operator of
its namespace with "attention" in its name. So if vLLM renames or wraps its attention one day, there are candidates
without a match. Where the graph is split at attention before it is compiled, no pass sees an attention operator: there
are no candidates, and the layer's attention backend does the same work.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kvcompile.passes.fuse import Misfit
from kvcompile.passes.result import PassResult


@dataclass(frozen=True)
class AttentionSwap:
    """The pass; see above. `source` and `target` are operators as `namespace::name`; their default overload counts."""

    source: str = "vllm::unified_attention_with_output"
    target: str = "kvcompile::pruned_kv8_attention"
    name: ClassVar[str] = "attention_swap"

    def __call__(self, graph: Graph) -> PassResult:
        matched = candidates = 0
        refused = []
        for node in graph.nodes:
            operator = self._attention(node)
            if operator is None:
                continue
            candidates += 1
            try:
                self._swap(node, operator)
                matched += 1
            except Misfit as why:
                refused.append(f"{node.name}: {why}")
        return PassResult(self.name, matched, candidates, tuple(refused))

    def _attention(self, node: Node) -> OpOverload | None:
        """The attention operator that `node` calls or hands on."""
        if node.op != "call_function":
            return None
        namespace = self.source.partition("::")[0]
        for held in itertools.chain((node.target,), node.args, node.kwargs.values()):
            if isinstance(held, OpOverload) and (
                held._schema.name == self.source or (held.namespace == namespace and "attention" in held._schema.name)
            ):
                return held
        return None

    def _swap(self, node: Node, operator: OpOverload) -> None:
        if operator._schema.name != self.source:
            raise Misfit(f"{operator._schema.name} is not the attention that this pass knows: {self.source}")
        if operator._overloadname != "default":
            raise Misfit(f"overload {operator._overloadname} of {self.source}")
        target = _operator(self.target)
        if _signature(operator) != _signature(target):
            raise Misfit(f"{self.target} takes other arguments: {target._schema}, instead of {operator._schema}")
        if node.target is operator:
            node.target = target
        elif node.target in (auto_functionalized, auto_functionalized_v2) and node.args == (operator,):
            node.args = (target,)
        else:
            raise Misfit(f"{self.source} is handed to {node.target}, which this pass does not know")


def _operator(name: str) -> OpOverload:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None:
        raise Misfit(f"{name} is not registered in this process")
    return packet.default


def _signature(operator: OpOverload) -> tuple[list[Any], list[str]]:
    """What a caller must know: arguments in order with type and default, which of them are written, and results."""
    schema = operator._schema
    arguments = [
        (a.name, str(a.type), a.has_default_value(), a.default_value, a.kwarg_only, a.is_write)
        for a in schema.arguments
    ]
    return arguments, [str(result.type) for result in schema.returns]
