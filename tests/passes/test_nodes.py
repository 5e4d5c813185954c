"""Reading nodes: the operator that one calls."""

from __future__ import annotations

import pytest
import torch
import vllm._C  # noqa: F401  vLLM's own kernels
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph

from kvcompile.passes.nodes import operator_name
from kvcompile.tools.graph_node import target


@pytest.mark.parametrize("functionalised", [auto_functionalized, auto_functionalized_v2])
def test_the_operator_is_seen_through_either_way_of_functionalising_it(functionalised: object) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(functionalised, (torch.ops._C.silu_and_mul.default,), {"input": x})
    assert operator_name(node) == "_C::silu_and_mul"
    assert target(node) == f"{functionalised.__name__}(_C.silu_and_mul)"


def test_what_calls_no_operator_has_no_name() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert operator_name(x) == ""
    assert operator_name(graph.call_function(len, (x,))) == ""
    assert operator_name(graph.call_function(torch.ops.aten.neg.default, (x,))) == "aten::neg"
