"""Which channels of which tensor a node is: slices and splits of a last dimension, read back to what they are of."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Node

from kvcompile.passes.nodes import arguments, calls, is_view, value, width

_aten = torch.ops.aten


class Part(NamedTuple):
    """Channels start to stop (exclusive) of the last dimension of `source`."""

    source: Node
    start: int
    stop: int


def part(node: Node) -> Part | None:
    """Which channels of which tensor `node` is, behind views that keep rows; None if it is no such part."""
    node = behind_rows(node)
    return _slice(node) if calls(node, _aten.slice.Tensor) else _split(node)


def behind_rows(node: Node) -> Node:
    """The node whose rows these are, behind views that keep them as they are."""
    while is_view(node) and width(node) == width(node.args[0]):
        node = node.args[0]
    return node


def is_last(dim: int, node: Node) -> bool:
    """Whether `dim` is the last dimension of a node's result."""
    return dim in (-1, value(node).dim() - 1)


def _slice(node: Node) -> Part | None:
    given = arguments(node)
    source, start, stop = given["self"], given["start"] or 0, given["end"]
    channels = width(source)
    stop = channels if stop is None else stop
    if channels is None or not is_last(given["dim"], source) or given["step"] != 1:
        return None
    if not isinstance(start, int) or not isinstance(stop, int):
        return None
    return Part(source, *slice(start, stop).indices(channels)[:2])


def _split(node: Node) -> Part | None:
    if not (calls(node, operator.getitem) and calls(node.args[0], _aten.split.Tensor, _aten.split_with_sizes.default)):
        return None
    given = arguments(node.args[0])
    source, sizes = given["self"], [size.shape[-1] for size in value(node.args[0])]
    if width(source) is None or not is_last(given["dim"], source) or not all(isinstance(n, int) for n in sizes):
        return None
    start = sum(sizes[: node.args[1]])
    return Part(source, start, start + sizes[node.args[1]])
