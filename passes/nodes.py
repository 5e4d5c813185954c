"""Reading FX nodes of a post-grad graph: which operator, with what, and what lies behind views and pointwise work."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Node

_aten = torch.ops.aten

# They hand on all elements in the same row-major order.
_VIEWS = {
    _aten.reshape.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.alias.default,
    _aten.clone.default,
}
_PARTS = {
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.expand.default,
    _aten.permute.default,
}


def calls(node: Any, *targets: Any) -> bool:
    """Whether `node` is a node that calls one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_item(node: Any, index: int) -> bool:
    """Whether `node` is result number `index` of an operator with several."""
    return calls(node, operator.getitem) and node.args[1] == index


def operator_name(node: Node) -> str:
    """`namespace::name` of the operator that a node calls, also through either auto_functionalized; "" otherwise."""
    target = node.args[0] if calls(node, auto_functionalized, auto_functionalized_v2) else node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def is_ours(name: str) -> bool:
    """Whether an operator of that name is kvcompile's: what a pass has put in is no site of another one."""
    return name.startswith("kvcompile::")


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of an operator's node by the names in its schema, defaults filled in."""
    schema = node.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def value(node: Node) -> torch.Tensor:
    """The fake tensor that stands for the node's result."""
    return node.meta["val"]


def width(node: Node) -> int | None:
    """Size of the last dimension; None where it is symbolic or there is none."""
    shape = value(node).shape
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def is_view(node: Any) -> bool:
    """Whether the node hands on its input's elements in the same order, in whatever shape."""
    return calls(node, *_VIEWS)


def behind_views(node: Node) -> Node:
    """The node whose elements these are, in the same order."""
    while is_view(node):
        node = node.args[0]
    return node


def pointwise_cone(node: Node) -> Iterator[Node]:
    """`node` and all that it is computed from elementwise; the nodes where that ends are given and not crossed."""
    seen, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        if pointwise or is_view(node) or calls(node, operator.getitem, *_PARTS):
            pending.extend(node.all_input_nodes)
