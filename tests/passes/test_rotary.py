"""Rotary embedding of query and key becomes one operator where it is whole, in each of its forms, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm._C  # noqa: F401  vLLM's own kernels
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult
from kvcompile.passes.rotary import Rotary
from tests.ops.rotary.heads import UNIT
from tests.passes.graphs import DTYPES, assert_sound, operators, random, trace

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 16, 50
WIDTHS = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
Pair = tuple[torch.Tensor, torch.Tensor]


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """positions, x, weight of a qkv projection, and a table."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand((ROWS, SIZE // 2), generator=generator) * 7
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    positions = torch.randint(ROWS, (tokens,), generator=generator)
    return positions, random(tokens, 8, dtype=dtype, seed=seed), random(8, sum(WIDTHS), dtype=dtype, seed=9), table


def native(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> Pair:
    """vLLM's forward in a compiled graph."""
    return RotaryEmbedding.forward_static(positions, query, key, SIZE, table.shape[1], table, True)


def by_slices(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> Pair:
    angles = table[positions].unsqueeze(1)
    cos, sin = angles[..., : SIZE // 2], angles[..., SIZE // 2 :]

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(-1, x.shape[1] // SIZE, SIZE)[..., : SIZE // 2], x.view(-1, x.shape[1] // SIZE, SIZE)[..., 8:]
        return torch.cat((cos * a - b * sin, sin * a + b * cos), 2).view(x.shape)

    return turned(query), turned(key)


FORMS: dict[str, Callable[..., Pair]] = {"vLLM's native forward": native, "slices, and terms the other way": by_slices}


def layer(form: Callable[..., Pair] = native) -> Callable[..., tuple[torch.Tensor, ...]]:
    def function(positions, x, weight, table):
        query, key, value = (x @ weight).split(WIDTHS, -1)
        query, key = form(positions, query, key, table)
        return query.view(-1, HEADS, SIZE), key.view(-1, KV_HEADS, SIZE), value.view(-1, KV_HEADS, SIZE)

    return function


def _joined(module: torch.fx.GraphModule) -> PassResult:
    result = Rotary()(module.graph)
    module.recompile()
    return result


def _calls(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=torch.ops.kvcompile.rotary.default))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rotary_embedding_becomes_one_operator_that_computes_the_same(form: str, dtype: torch.dtype) -> None:
    module = trace(layer(FORMS[form]), *inputs(5, dtype))
    before = copy.deepcopy(module)
    assert _joined(module) == PassResult("rotary", 1, 1)
    names = operators(module)
    assert names.count("rotary") == 1 and not {"cat", "mul", "sub", "index"} & set(names)
    for tokens in (1, 2, 200):
        given = inputs(tokens, dtype, seed=tokens)
        for ours, theirs in zip(module(*given), before(*given), strict=True):
            assert ours.shape == theirs.shape
            # The graph, run as it is, rounds each product too; see `ops/rotary/op.py`.
            bound = 4 * UNIT[dtype] * theirs.abs().max() if dtype != torch.float32 else 0.0
            assert (ours - theirs).abs().max() <= bound
    assert_sound(module, *inputs(3, dtype))


@pytest.mark.long
def test_what_inductor_makes_of_the_graph_rounds_as_the_operator_does() -> None:
    compiled = torch.compile(native, fullgraph=True, dynamic=True)
    for tokens in (3, 64):
        positions, x, weight, table = inputs(tokens, torch.bfloat16, seed=tokens)
        query, key, _ = (x @ weight).split(WIDTHS, -1)
        ours, theirs = torch.ops.kvcompile.rotary(query, key, positions, table), compiled(positions, query, key, table)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_query_and_key_are_read_where_the_projection_wrote_them() -> None:
    module = trace(layer(), *inputs(5, torch.bfloat16))
    _joined(module)
    (node,) = _calls(module)
    query, key, positions, table, settled = node.args
    assert [x.meta["val"].stride() for x in (query, key)] == [(sum(WIDTHS), 1)] * 2
    assert [x.args[0].target for x in (query, key)] == [torch.ops.aten.mm.default] * 2
    assert (positions.op, table.op, settled) == ("placeholder", "placeholder", True)
    assert [x.stride() for x in node.meta["eager_input_vals"][0][:2]] == [(sum(WIDTHS), 1)] * 2


NOT_SETTLED: dict[str, Callable[..., Any]] = {
    "positions are computed": lambda p, x, w, t: layer()(p + 1, x, w, t),
    "the table is converted": lambda p, x, w, t: layer()(p, x, w, t.float().bfloat16()),
    "the projection is an input": lambda p, x, w, t: native(p, *w.split(WIDTHS, 1)[:2], t),
    "it is a view of one": lambda p, x, w, t: native(p, *w.view(-1, sum(WIDTHS)).split(WIDTHS, 1)[:2], t),
}


@pytest.mark.parametrize("function", NOT_SETTLED.values(), ids=NOT_SETTLED)
def test_what_is_computed_here_may_still_be_written_where_query_and_key_are_turned(function) -> None:
    module = trace(function, *inputs(8, torch.bfloat16))
    assert _joined(module) == PassResult("rotary", 1, 1)
    assert [node.args[4] for node in _calls(module)] == [False]


def test_views_of_their_own_for_each_reader_are_seen_through() -> None:
    """As functionalisation leaves them behind a projection that writes its output in place."""
    module = trace(layer(), *inputs(5, torch.bfloat16))
    graph = module.graph
    # A split, and all behind it up to the products, for each product by itself.
    for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        half, angle = product.args
        chain = [half]
        while chain[-1].target is not torch.ops.aten.mm.default:
            chain.append(chain[-1].args[0])
        copied = {chain[-1]: chain[-1]}
        with graph.inserting_before(product):
            for node in chain[-2::-1]:
                copied[node] = graph.node_copy(node, lambda n, copied=copied: copied.get(n, n))
        product.args = (copied[half], angle)
    graph.eliminate_dead_code()
    module.recompile()
    names = operators(module)
    assert names.count("split_with_sizes") == 8 + 1
    before = copy.deepcopy(module)
    assert _joined(module) == PassResult("rotary", 1, 1)
    assert operators(module).count("split_with_sizes") == 1
    given = inputs(5, torch.bfloat16)
    for ours, theirs in zip(module(*given), before(*given), strict=True):
        assert (ours - theirs).abs().max() <= 4 * UNIT[torch.bfloat16] * theirs.abs().max()


def test_layers_that_share_the_angles_have_an_operator_each() -> None:
    def function(positions, x, weight, table):
        for _ in range(3):
            query, key, value = layer()(positions, x, weight, table)
            x = x + (query.sum(1) + key.sum(1) + value.sum(1))[:, :8]
        return x

    module = trace(function, *inputs(5, torch.float32))
    before = copy.deepcopy(module)
    assert operators(module).count("index") == 1
    assert _joined(module) == PassResult("rotary", 3, 3)
    assert operators(module).count("rotary") == 3 and "index" not in operators(module)
    assert torch.equal(module(*inputs(7, torch.float32)), before(*inputs(7, torch.float32)))
    unchanged = str(module.graph)
    assert _joined(module) == PassResult("rotary", 0, 0)
    assert str(module.graph) == unchanged


def _untouched(function: Callable[..., Any], *given: torch.Tensor) -> PassResult:
    module = trace(function, *given)
    before = str(module.graph)
    result = Rotary()(module.graph)
    assert str(module.graph) == before
    return result


def _gptj(positions, query, key, table):
    return RotaryEmbedding.forward_static(positions, query, key, SIZE, SIZE, table, False)


def _partial(positions, query, key, table):
    return RotaryEmbedding.forward_static(positions, query, key, SIZE, SIZE // 2, table[:, ::2], True)


def _normalised(positions, query, key, table):
    query, key = (x.view(-1, x.shape[1] // SIZE, SIZE) for x in (query, key))
    query, key = ((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)).flatten(1) for x in (query, key))
    return native(positions, query, key, table)


def _query_alone(positions, query, key, table):
    return RotaryEmbedding.forward_static(positions, query, None, SIZE, SIZE, table, True)[0], key


KEPT: dict[str, tuple[Callable[..., Any], str]] = {
    "neighbours": (layer(_gptj), "index: neighbouring channels of a head are turned as pairs"),
    "part of a head": (layer(_partial), "8 of 16 channels of a head are turned"),
    "normalised": (layer(_normalised), "is no part of a projection: it is computed where it is turned"),
    "query alone": (layer(_query_alone), "cat: of the parts of mm, 1 are turned, not query and key"),
}


@pytest.mark.parametrize(("function", "why"), KEPT.values(), ids=KEPT)
def test_what_the_operator_is_not_for_is_no_candidate(function, why: str) -> None:
    result = _untouched(function, *inputs(5, torch.bfloat16))
    assert (result.matched, result.candidates) == (0, 0)
    assert result.refused and all(why in said for said in result.refused)


def test_positions_of_several_dimensions_are_no_candidate() -> None:
    def function(positions, x, weight, table):
        query = (x @ weight)[:, : HEADS * SIZE].view(-1, HEADS, SIZE)
        cos, sin = (half[0, :, None] for half in table[torch.stack((positions, positions))].chunk(2, 2))
        return ApplyRotaryEmb.forward_static(query, cos[:, 0], sin[:, 0])

    assert _untouched(function, *inputs(5, torch.bfloat16)) == PassResult("rotary", 0, 0)


def test_vllms_own_kernel_is_no_candidate() -> None:
    def function(positions, x, weight, table):
        query, key, _ = (x @ weight).split(WIDTHS, -1)
        arguments = {"positions": positions, "query": query, "key": key, "head_size": SIZE, "cos_sin_cache": table}
        operator = torch.ops._C.rotary_embedding.default
        return auto_functionalized(operator, **arguments, is_neox=True, rope_dim_offset=0, inverse=False)[1:]

    result = _untouched(function, *inputs(5, torch.bfloat16))
    assert (result.matched, result.candidates) == (0, 0)
    assert [said.partition(": ")[2] for said in result.refused] == ["vLLM's own kernel turns query and key"]


def _in_fp32(positions, query, key, table):
    angles = table[positions].float()
    views = (x.view(-1, x.shape[1] // SIZE, SIZE).float() for x in (query, key))
    return tuple(ApplyRotaryEmb.forward_static(x, *angles.chunk(2, 1)).to(query.dtype).flatten(1) for x in views)


def _signs_swapped(positions, query, key, table):
    cos, sin = table[positions].chunk(2, 1)
    table = torch.cat((cos, sin), 1)
    views = (x.view(-1, x.shape[1] // SIZE, SIZE) for x in (query, key))
    halves = [x.chunk(2, 2) for x in views]
    cos, sin = cos[:, None], sin[:, None]
    return tuple(torch.cat((a * cos + b * sin, b * cos - a * sin), 2).flatten(1) for a, b in halves)


def _with_angles(rows: Callable[..., torch.Tensor]) -> Callable[..., Pair]:
    def form(positions, query, key, table):
        cos, sin = rows(positions, table).unsqueeze(1).chunk(2, -1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x.view(-1, x.shape[1] // SIZE, SIZE).chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(x.shape)

        return turned(query), turned(key)

    return form


MISFITS: dict[str, tuple[Callable[..., Any], str]] = {
    "fp32": (layer(_in_fp32), "index: what is multiplied with these rows of a table is turned in no form"),
    "backwards": (layer(_signs_swapped), "index: what is multiplied with these rows of a table is turned in no form"),
    "positions of 32 bits": (
        lambda p, x, w, t: layer()(p.int(), x, w, t),
        "cat: positions are torch.int32, and strides of the table (16, 1)",
    ),
    "one row of the table for all tokens": (
        layer(_with_angles(lambda p, t: t[p[:1]])),
        "cat: angles are 16 wide for heads of 16, or not one row of the table for each token",
    ),
    "one angle for a whole head": (
        layer(_with_angles(lambda p, t: t[:, :2].contiguous()[p])),
        "cat: angles are 2 wide for heads of 16, or not one row of the table for each token",
    ),
    "a table by columns": (
        lambda p, x, w, t: layer()(p, x, w, t.t().contiguous().t()),
        "cat: positions are torch.int64, and strides of the table (1, ",
    ),
}


@pytest.mark.parametrize(("function", "why"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_a_candidate_left_alone_with_a_reason(function, why: str) -> None:
    result = _untouched(function, *inputs(5, torch.bfloat16))
    assert (result.matched, result.candidates) == (0, 1)
    assert len(result.refused) == 1 and result.refused[0].startswith(why)


NO_CANDIDATES: dict[str, Callable[..., Any]] = {
    "a gather that nothing is multiplied with": lambda p, x, w, t: (x @ w, t[p].chunk(2, 1)),
    "a product with whole rows": lambda p, x, w, t: x[:, :1] * t[p],
    "a product with one half": lambda p, x, w, t: x[:, :1] * t[p][:, :8],
    "a mask": lambda p, x, w, t: x[:, :1] * (t[p] > 0),
}


@pytest.mark.parametrize("function", NO_CANDIDATES.values(), ids=NO_CANDIDATES)
def test_other_rows_of_a_table_are_no_candidate(function) -> None:
    assert _untouched(function, *inputs(5, torch.bfloat16)) == PassResult("rotary", 0, 0)


def test_strict_stops_at_a_rotation_that_no_longer_fits_and_says_why() -> None:
    graph = trace(MISFITS["backwards"][0], *inputs(5, torch.bfloat16)).graph
    strict = PassPipeline({**to_dict(KVCompileConfig()), "strict": True})
    with pytest.raises(PassError, match=r"rotary matched none of 1 .*\(index: what is multiplied"):
        strict(graph)


def test_switched_off_the_graph_stays_as_it_is() -> None:
    off = PassPipeline(to_dict(resolve(overrides={"passes.rotary": False}, environ={}).config))
    module = trace(layer(), *inputs(5, torch.bfloat16))
    before = str(module.graph)
    assert off(module.graph) == [PassResult(name, 0, 0) for name in ("norm_quant", "swiglu_quant", "attention_swap")]
    assert str(module.graph) == before
