r"""Rotary embedding of a layer's queries and keys becomes one operator.

before, drawn for the query; the same for the key, with the angles of the same positions

    cos_sin_cache [P, d]   positions [T]         qkv [T, (H + 2G) d]
                   \       /                             |
                  aten.index                       slice, as [T, H, d]
                  /        \                        /             \
       slice[0:d/2]     slice[d/2:d]        slice[0:d/2]     slice[d/2:d]
            c                s                    x1               x2           after
              \               \                   /               /
                x1 * c - x2 * s          x2 * c + x1 * s                  qkv's parts  positions  cos_sin_cache
                              \           /                                        \       |       /
                                aten.cat                                          kvcompile.rotary
                                   |                                               |[0]        |[1]
                             query [T, H, d]                                    query           key

Halves may come from slices or splits, factors and the terms of the sum in either order. Inductor makes a kernel of each
of query and key out of this, with one rounding at the end, and so rounds the operator (`ops/rotary/op.py`). It takes
the qkv projection's output where it lies and is a programmatic launch as all of kvcompile's kernels are.

`settled` is set where positions and table are inputs of the graph and qkv is not: then whatever computes qkv, at least,
has run between what wrote them and this.

Candidates are pairs of query and key, or what else is multiplied with both halves of such rows of a table. No candidate
is what this operator is not for and Inductor or vLLM does well: a query that has been normalised first, which Inductor
computes in the same kernel; part of a head; neighbours as pairs; positions of several dimensions; vLLM's own kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import kvcompile.ops.rotary  # noqa: F401  registers the operator
from kvcompile.ops.act_quant.checks import DTYPES
from kvcompile.passes.fuse import Kept, Misfit, erase, insert, reshaped
from kvcompile.passes.nodes import arguments, behind_views, calls, is_ours, is_view, operator_name, value, width
from kvcompile.passes.parts import behind_rows, is_last, part
from kvcompile.passes.result import PassResult

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_PARTS = (operator.getitem, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default)


class _Half(NamedTuple):
    """Half `number`, 0 or 1, of the last dimension of `source`."""

    source: Node
    number: int


class _Heads(NamedTuple):
    """[T, number, size]: channels start to stop (exclusive) of `source`.

    Not the node that has them: Inductor may have a slice and a view of its own for each who reads them.
    """

    source: Node
    start: int
    stop: int
    number: int
    size: int


class _Turned(NamedTuple):
    """`result` [T, H, d] is `x` turned by `angles` [T, d], rows of a table."""

    result: Node
    x: _Heads
    angles: Node


class Rotary:
    """The pass; see above."""

    name = "rotary"

    def __call__(self, graph: Graph) -> PassResult:
        matched = candidates = 0
        refused = [f"{node.name}: vLLM's own kernel turns query and key" for node in graph.nodes if _is_vllms(node)]
        order = {node: number for number, node in enumerate(graph.nodes)}
        turned = [found for node in order if (found := _turned(node)) is not None]
        for angles in [node for node in order if _is_table_of_halves(node)]:
            for group in _groups([each for each in turned if each.angles is angles]) or [()]:
                try:
                    if not group:
                        raise _unknown(angles)
                    _replace(graph, group, order)
                    matched, candidates = matched + 1, candidates + 1
                except (Misfit, Kept) as why:
                    candidates += isinstance(why, Misfit)
                    refused.append(f"{(group[0].result if group else angles).name}: {why}")
        return PassResult(self.name, matched, candidates, tuple(refused))


def _is_vllms(node: Node) -> bool:
    name = operator_name(node)
    return "rotary_embedding" in name and not is_ours(name)


def _is_table_of_halves(node: Node) -> bool:
    """Whether `node` gathers a row of a table for each token, and both halves of rows are multiplied with something."""
    if not calls(node, _aten.index.Tensor) or len(node.args[1]) != 1:
        return False
    halves = {number for number, _ in _products(node, None)}
    return value(node).dim() == value(node.args[0]).dim() == 2 and halves >= {0, 1}


def _products(node: Node, half: int | None) -> Iterator[tuple[int | None, Node]]:
    """(0 or 1 for a half of the gathered rows, a product with it), through views and casts."""
    for user in node.users:
        if calls(user, _aten.mul.Tensor):
            yield half, user
        elif is_view(user) or calls(user, _CAST, *_PARTS):
            found = _half(user)
            yield from _products(user, found.number if found is not None and half is None else half)


def _half(node: Node) -> _Half | None:
    found = part(node) if isinstance(node, Node) else None
    if found is None:
        return None
    channels = width(found.source)
    halves = [(0, channels // 2), (channels // 2, channels)]
    given = (found.start, found.stop)
    return _Half(found.source, halves.index(given)) if channels % 2 == 0 and given in halves else None


def _unknown(angles: Node) -> Misfit | Kept:
    """Why nothing is turned by these angles as this pass knows it."""
    for _, product in _products(angles, None):
        for factor in product.args:
            factor = behind_views(factor.args[0] if calls(factor, _CAST) else factor)
            if calls(factor, _aten.slice.Tensor) and arguments(factor)["step"] != 1:
                return Kept("neighbouring channels of a head are turned as pairs")
    return Misfit("what is multiplied with these rows of a table is turned in no form that this pass knows")


def _turned(node: Node) -> _Turned | None:
    """What `node` is if it is [x1 * c - x2 * s | x2 * c + x1 * s]."""
    if not calls(node, _aten.cat.default):
        return None
    given = arguments(node)
    if len(given["tensors"]) != 2 or not is_last(given["dim"], node):
        return None
    first, second = given["tensors"]
    if not calls(first, _aten.sub.Tensor) or not calls(second, _aten.add.Tensor) or first.kwargs or second.kwargs:
        return None
    terms = [_term(each) for each in (*first.args, *second.args)]
    if None in terms:
        return None
    x, _, angles, _ = terms[0]
    x1c, x2s, x2c, x1s = ((x, half, angles, of_angles) for half, of_angles in ((0, 0), (1, 1), (1, 0), (0, 1)))
    fits = terms[:2] == [x1c, x2s] and set(terms[2:]) == {x2c, x1s}
    return _Turned(node, x, angles) if fits else None


def _term(node: Node) -> tuple[_Heads, int, Node, int] | None:
    """(heads, their half, angles, their half) where `node` is the product of both, all heads with the same angles."""
    if not calls(node, _aten.mul.Tensor):
        return None
    for x, angle in (node.args, node.args[::-1]):
        of_x, of_angles = _half(x), _half(angle)
        if of_x is None or of_angles is None:
            continue
        heads, angles, shape = _heads(of_x.source), behind_rows(of_angles.source), value(angle).shape
        if heads is not None and calls(angles, _aten.index.Tensor) and len(shape) == 3 and shape[1] == 1:
            return heads, of_x.number, angles, of_angles.number
    return None


def _heads(x: Node) -> _Heads | None:
    shape = value(x).shape
    if len(shape) != 3 or not isinstance(shape[1], int) or width(x) is None:
        return None
    rows = behind_views(x)
    found = part(rows)
    return _Heads(*(found or (rows, 0, width(rows))), shape[1], shape[2])


def _groups(turned: Sequence[_Turned]) -> list[list[_Turned]]:
    """Those that are turned parts of one tensor together, in the order of its channels."""
    groups: dict[Node, list[_Turned]] = {}
    for each in turned:
        groups.setdefault(each.x.source, []).append(each)
    return [sorted(group, key=lambda each: each.x.start) for group in groups.values()]


def _replace(graph: Graph, group: Sequence[_Turned], order: Mapping[Node, int]) -> None:
    """One operator for a query and its key. Raises Misfit or Kept where they are not."""
    source, angles = group[0].x.source, group[0].angles
    table, positions = angles.args[0], angles.args[1][0]
    for each in group:
        _check(each)
    if len(group) != 2:
        raise Kept(f"of the parts of {source.name}, {len(group)} are turned, not query and key")
    if value(positions).dtype != torch.int64 or not value(table).is_contiguous():
        raise Misfit(f"positions are {value(positions).dtype}, and strides of the table {value(table).stride()}")
    settled = table.op == positions.op == "placeholder" != behind_views(source).op
    place = min((each.result for each in group), key=order.__getitem__)
    with graph.inserting_before(place):
        rows = [insert(graph, _aten.slice.Tensor, (source, 1, x.start, x.stop), place) for _, x, _ in group]
        fused = insert(graph, torch.ops.kvcompile.rotary.default, (*rows, positions, table, settled), place)
        for number, (result, x, _) in enumerate(group):
            new = insert(graph, operator.getitem, (fused, number), result)
            result.replace_all_uses_with(reshaped(graph, new, (-1, x.number, x.size)))
    erase(graph, [each.result for each in group])


def _check(turned: _Turned) -> None:
    """Raise unless the heads are a part of a tensor of two dimensions, and all of one dtype that the operator takes."""
    source, start, stop, number, size = turned.x
    if value(source).dim() == 3 and stop - start < width(source):
        raise Kept(f"{size} of {width(source)} channels of a head are turned")
    if (start, stop) == (0, width(source)):
        raise Kept(f"{source.name} is no part of a projection: it is computed where it is turned")
    if value(source).dim() != 2 or number * size != stop - start or value(source).stride(-1) != 1:
        raise Misfit(f"{number} heads of {size} are channels {start}:{stop} of {source.name}, a view of other heads")
    (tokens, *_), (rows, columns) = value(source).shape, value(turned.angles).shape
    if columns != size or statically_known_true(rows != tokens):  # what only broadcasts is something else
        raise Misfit(f"angles are {columns} wide for heads of {size}, or not one row of the table for each token")
    dtypes = {value(node).dtype for node in (source, turned.angles, turned.result)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES.get(value(source).device.type, ())):
        raise Misfit(f"dtypes are {', '.join(sorted(map(str, dtypes)))} on {value(source).device}")
