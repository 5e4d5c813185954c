"""Bytes that an operator reads and writes, from the sizes of its arguments and results, the token dimension symbolic.

    bytes(operator) = sum over its tensor arguments and results of elements * bytes per element
                    = token * T + constant

`token` are bytes per token (activations), `constant` those that do not depend on the number of tokens (weights,
tables). Each argument counts once, a dimension of stride 0 (expanded) as one element. Views cost nothing: they are read
where somebody computes with them. A gather reads of its table as much as it returns, rotary embedding a row for each
position. A buffer that is made but not filled costs nothing. It is what the operators would move if each of them ran by
itself: Inductor fuses neighbouring pointwise operators further, before and after the passes alike, and caches keep some
of it: no measurement of traffic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import Node

from kvcompile.passes.nodes import behind_views, is_view, operator_name, value

_aten = torch.ops.aten
_GATHERS = {_aten.embedding.default: 0, _aten.index_select.default: 0, _aten.index.Tensor: 0}
# Inputs: a table, and the indices of the rows that are read of it.
_TABLES = {"kvcompile::rotary": (3, 2)}
_UNFILLED = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default}


def is_free(node: Node) -> bool:
    """Whether the node moves nothing: no operator, a view, an element of a tuple, a size, a buffer not yet filled."""
    called = node.target
    if node.op != "call_function" or called is operator.getitem or called in _UNFILLED:
        return True
    if not isinstance(called, torch._ops.OperatorBase):
        return True  # arithmetic on sizes
    return is_looking(node)


def is_looking(node: Node) -> bool:
    """Whether the node hands on its argument's storage, or only a size of it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    copies = node.target is _aten.clone.default
    return not copies and (node.target.is_view or is_view(node) or name.startswith("aten::sym_"))


def moved(node: Node, tokens: Any | None) -> dict[str, Any] | None:
    """{"token", "constant"} of the node, None where it is free; {"other": expression} where it is no such sum."""
    if is_free(node):
        return None
    table = _GATHERS.get(node.target)
    total, sources = _all(node), list(dict.fromkeys(node.all_input_nodes))
    picked, rows = _TABLES.get(operator_name(node), (None, None))
    for index, source in enumerate(sources):
        if index == picked:
            total += _rows(source, sources[rows])
        elif behind_views(source).target not in _UNFILLED:  # else there is nothing in it to be read
            total += _all(node if index == table else source)
    return _split(total, tokens)


def _all(node: Node) -> Any:
    return sum((_bytes(value) for value in _values(node.meta.get("val"))), sympy.Integer(0))


def _rows(table: Node, indices: Node) -> Any:
    sizes = (*value(indices).shape, *value(table).shape[1:])
    return prod(map(_expression, sizes), start=sympy.Integer(1)) * value(table).element_size()


def _split(total: Any, tokens: Any | None) -> dict[str, Any]:
    total = sympy.expand(total)
    token = sympy.Integer(0) if tokens is None else total.coeff(tokens, 1)
    constant = total - (0 if tokens is None else token * tokens)
    if not (token.is_Integer and constant.is_Integer):
        return {"other": str(total)}
    return {"token": int(token), "constant": int(constant)}


def _values(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _values(item)


def _bytes(value: torch.Tensor) -> Any:
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if not _is_zero(stride)]
    return prod((_expression(size) for size in sizes), start=sympy.Integer(1)) * value.element_size()


def _is_zero(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 0


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
