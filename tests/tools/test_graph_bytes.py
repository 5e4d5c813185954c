"""Bytes that operators move: exact values, the token dimension symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.passes.graphs import trace
from torch._higher_order_ops.auto_functionalize import auto_functionalized

import kvcompile.ops.act_quant
import kvcompile.ops.rotary  # noqa: F401  registers the operator
from kvcompile.tools.graph_bytes import is_free, moved
from kvcompile.tools.graph_node import token_symbol

aten = torch.ops.aten
TABLE, WEIGHT = torch.randn(100), torch.randn(48, 32)


def _moved(function: Callable[..., Any], *inputs: torch.Tensor, name: str) -> dict[str, Any] | None:
    module = trace(function, *inputs)
    (node,) = (node for node in module.graph.nodes if node.name == name)
    return moved(node, token_symbol(module.graph.nodes))


def _x(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(7, 32, dtype=dtype)


def test_an_operator_reads_its_arguments_and_writes_its_results() -> None:
    assert _moved(lambda x: aten.neg(x), _x(), name="neg") == {"token": 2 * 32 * 2, "constant": 0}


def test_weights_are_constant_and_activations_per_token() -> None:
    def add(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return aten.add(x, bias)

    assert _moved(add, _x(torch.float32), torch.zeros(32), name="add") == {"token": 2 * 32 * 4, "constant": 32 * 4}


def test_an_argument_given_twice_is_read_once() -> None:
    assert _moved(lambda x: aten.mul(x, x), _x(), name="mul") == {"token": 2 * 32 * 2, "constant": 0}


def test_results_count_by_their_own_dtypes() -> None:
    quantised = _moved(lambda x: torch.ops.kvcompile.quant_per_token(x), _x(), name="quant_per_token")
    assert quantised == {"token": 32 * 2 + 32 + 4, "constant": 0}


def test_a_view_is_free_and_its_reader_reads_the_part_that_it_shows() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return aten.neg(aten.slice(x, 1, 0, 8))

    assert _moved(half, _x(), name="slice_1") is None
    assert _moved(half, _x(), name="neg") == {"token": 2 * 8 * 2, "constant": 0}


def test_an_expanded_dimension_is_read_once() -> None:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return aten.add(x, aten.expand(aten.slice(x, 1, 0, 1), [x.shape[0], 32]))

    assert _moved(wide, _x(), name="add") == {"token": 32 * 2 + 1 * 2 + 32 * 2, "constant": 0}


def test_a_gather_reads_as_much_of_its_table_as_it_returns() -> None:
    def look_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return aten.index(table, [x])

    module = trace(lambda x, table: look_up(aten.select(x, 1, 0), table), torch.zeros(7, 2).long(), torch.zeros(100))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert moved(node, token_symbol(module.graph.nodes)) == {"token": 8 + 4 + 4, "constant": 0}


def test_rotary_embedding_reads_one_row_of_its_table_for_each_position() -> None:
    def turned(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.kvcompile.rotary(qkv[:, :16], qkv[:, 16:24], positions, table)

    table = torch.zeros(100, 8, dtype=torch.bfloat16)
    module = trace(turned, _x(), torch.zeros(7, dtype=torch.int64), table)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.kvcompile.rotary.default)
    # The rows of the table are another symbol in this graph.
    tokens = node.meta["val"][0].shape[0].node.expr
    assert moved(node, tokens) == {"token": 2 * (16 + 8) * 2 + 8 + 8 * 2, "constant": 0}


def test_a_buffer_that_is_not_filled_costs_nothing_and_is_not_read() -> None:
    with torch.library._scoped_library("graph_bytes_test", "DEF") as library:
        library.define("fill(Tensor x, Tensor(a!) out) -> ()")
        fill = torch.ops.graph_bytes_test.fill.default
        module = trace(lambda x: (aten.neg(x), aten.empty_like(x)), _x())
        graph = module.graph
        x, (output,) = next(iter(graph.nodes)), graph.find_nodes(op="output")
        with graph.inserting_before(output):
            out = graph.call_function(aten.empty.memory_format, ([1],))
            call = graph.call_function(auto_functionalized, (fill,), {"x": x, "out": out})
        out.meta["val"] = x.meta["val"]
        call.meta["val"] = (None, x.meta["val"])
        assert is_free(out)
        assert moved(call, token_symbol(graph.nodes)) == {"token": 2 * 32 * 2, "constant": 0}


def test_sizes_that_are_no_multiple_of_the_tokens_are_said_not_guessed() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return aten.mm(x, aten.t(x))

    result = _moved(outer, _x(torch.float32), name="mm")
    assert set(result) == {"other"}
    assert "**2" in result["other"]


@pytest.mark.parametrize("target", ["sym_size_int", "getitem"])
def test_sizes_and_elements_of_tuples_are_free(target: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.reshape(aten.split(x, 16, 1)[0], [x.shape[0], 4, 4])

    nodes = [n for n in trace(function, _x()).graph.nodes if n.name.startswith(target)]
    assert nodes
    assert all(map(is_free, nodes))
