"""What the fusions with a quantiser have in common: finding the quantisers, and putting one operator in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

import kvcompile.ops.act_quant  # noqa: F401  registers the operators
from kvcompile.passes.nodes import behind_views, calls, is_view, value, width
from kvcompile.passes.result import PassResult

_QUANTISER = torch.ops.kvcompile.quant_per_token.default
# What graph dumps and traces show of a node's origin. Nothing else may be copied from a node of another operator.
_ORIGIN = ("stack_trace", "nn_module_stack")


class Misfit(Exception):
    """Why a site that the pass is for does not fit its pattern: a candidate without a match."""


class Kept(Exception):
    """Why a site is better left as it is: no candidate."""


@dataclass(frozen=True)
class Fusion:
    """One operator for what computes a tensor and for its quantisers.

    `rows`: its tensor arguments [..., K], which it gets as [T, K]; `others`: the arguments behind them; `place`: the
    node before which it goes; `further`: (number of a result, node that it replaces), beyond the two of a quantiser.
    """

    operator: torch._ops.OpOverload
    rows: Sequence[Node]
    others: Sequence[Any]
    place: Node
    further: Sequence[tuple[int, Node]] = ()


def fuse_quantisers(graph: Graph, name: str, find: Callable[[Node], Fusion | None]) -> PassResult:
    """Fuse each quantised tensor for which `find` gives a Fusion; several quantisers of a tensor share one operator.

    `find(y)`: y is quantised. None if the pass is not for what computes y; raises `Misfit` or `Kept` with the reason.
    A y that somebody else reads too has to be written anyway. The fused operator would then compute it once more only
    to save the quantiser's reading, so this is left as it is and is no candidate. Counts are of quantisers.
    """
    matched = candidates = 0
    refused = []
    seen: set[Node] = set()
    for quantiser in graph.find_nodes(op="call_function", target=_QUANTISER):
        if quantiser in seen:
            continue
        # Not earlier: fusing another site may have replaced what this one reads.
        y = behind_views(quantiser.args[0])
        readers = _readers(y)
        quantisers = [node for node in readers if calls(node, _QUANTISER)]
        needed = len(quantisers) < len(readers)
        seen.update(quantisers)
        try:
            fusion = find(y)
            if fusion is None:
                continue
            if needed:
                raise Kept("what it quantises is read by others too")
            _check(y, quantisers, fusion)
        except (Misfit, Kept) as why:
            if isinstance(why, Misfit) and not needed:
                candidates += len(quantisers)
            refused.append(f"{quantiser.name}: {why}")
            continue
        _replace(graph, quantisers, fusion)
        candidates += len(quantisers)
        matched += len(quantisers)
    return PassResult(name, matched, candidates, tuple(refused))


def _readers(y: Node) -> list[Node]:
    """The nodes that read y, as it is or through views."""
    return [reader for user in y.users for reader in (_readers(user) if is_view(user) else [user])]


def _check(y: Node, quantisers: Iterable[Node], fusion: Fusion) -> None:
    """Raise Misfit unless the rows that are quantised are those of y, and of the fused operator's arguments."""
    for quantiser in quantisers:
        if width(y) is None:
            raise Misfit("the number of channels is dynamic")
        if width(quantiser.args[0]) != width(y):
            shapes = f"{tuple(value(y).shape)} and then {tuple(value(quantiser.args[0]).shape)}"
            raise Misfit(f"a reshape changes the rows before they are quantised: {shapes}")
    for node in fusion.rows:
        if value(node).stride(-1) != 1 and width(node) != 1:
            raise Misfit(f"{node.name}: the elements of a row are not neighbours")
        if value(node).dim() != 2 and sum(not isinstance(n, int) for n in value(node).shape) > 1:
            raise Misfit(f"{node.name}: more than one dimension is dynamic")
    for node in (*quantisers, *{node.args[0] for _, node in fusion.further}):
        if not all(calls(user, operator.getitem) for user in node.users):
            raise Misfit(f"{node.name}: its results are used as one tuple")


def _replace(graph: Graph, quantisers: Sequence[Node], fusion: Fusion) -> None:
    origin = fusion.place
    with graph.inserting_before(fusion.place):
        rows = [node if value(node).dim() == 2 else reshaped(graph, node, (-1, width(node))) for node in fusion.rows]
        fused = insert(graph, fusion.operator, (*rows, *fusion.others), origin)
        results = [insert(graph, operator.getitem, (fused, i), origin) for i in range(2)]
        replaced = [(user, results[user.args[1]]) for quantiser in quantisers for user in quantiser.users]
        dead = [node for _, node in fusion.further if not node.users]
        for index, node in fusion.further:
            if node in dead:
                continue
            result = insert(graph, operator.getitem, (fused, index), origin)
            shape = [n if isinstance(n, int) else -1 for n in value(node).shape]
            replaced.append((node, result if len(shape) == 2 else reshaped(graph, result, shape)))
    for old, new in replaced:
        old.replace_all_uses_with(new)
    erase(graph, [*dead, *(old for old, _ in replaced)])


def reshaped(graph: Graph, node: Node, shape: Sequence[int]) -> Node:
    """`node` in another shape, put in where the graph inserts."""
    return insert(graph, torch.ops.aten.reshape.default, (node, list(shape)), node)


def insert(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], origin: Node) -> Node:
    """A call of `target`, put in where the graph inserts, with fake results; graph dumps take it for `origin`'s."""
    node = graph.call_function(target, args)
    values = map_arg(args, value)
    node.meta.update({key: origin.meta[key] for key in _ORIGIN if key in origin.meta})
    node.meta["val"] = target(*values)
    if isinstance(target, torch._ops.OpOverload):
        # Inductor gives an operator the strides that are recorded here, and any that it likes where nothing is.
        node.meta["eager_input_vals"] = (values, {})
    return node


def erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those that nobody uses, and what then nobody uses of what they were computed from."""
    pending, erased = list(nodes), set()
    while pending:
        node = pending.pop()
        if node not in erased and not node.users and not node.is_impure():
            erased.add(node)
            pending.extend(node.all_input_nodes)
            graph.erase_node(node)
