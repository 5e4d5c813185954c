"""vLLM's attention operator gives way to kvcompile's, with every argument; whatever else looks like attention stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph, GraphModule

from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.passes.attention_swap import AttentionSwap
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult
from tests.passes.graphs import assert_sound, operators, random, trace

ARGUMENTS = "(Tensor query, Tensor key, Tensor(a!) output, str layer_name, Tensor? scale=None, Tensor? dep=None) -> ()"
SCHEMAS = {
    "stock_of_a_test": [
        f"attention_with_output{ARGUMENTS}",
        f"attention_with_output.other{ARGUMENTS}",
        f"latent_attention{ARGUMENTS}",
        f"cache_update{ARGUMENTS}",
    ],
    "ours_of_a_test": [
        f"attention{ARGUMENTS}",
        f"attention_that_writes_query{ARGUMENTS.replace('Tensor query', 'Tensor(b!) query')}",
        f"attention_with_another_default{ARGUMENTS.replace('scale=None', 'scale')}",
        f"attention_with_another_name{ARGUMENTS.replace('dep=', 'dependency=')}",
        "attention_with_a_result" + ARGUMENTS.replace("()", "Tensor"),
    ],
    "others_of_a_test": [f"attention_with_output{ARGUMENTS}"],
}
SWAP = AttentionSwap("stock_of_a_test::attention_with_output", "ours_of_a_test::attention")
X, Y = random(5, 8, dtype=torch.bfloat16, seed=1), random(5, 8, dtype=torch.bfloat16, seed=2)


def _compute(query, key, output, layer_name, scale=None, dep=None) -> None:
    output.copy_(query * len(layer_name) + key * (1 if scale is None else scale))


def _register(namespace: str, schemas: list[str]) -> torch.library.Library:
    """All operators compute the same, so that a swapped graph can be run against the one before."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in schemas:
        library.define(schema)
        library.impl(schema.partition("(")[0], _compute, "CompositeExplicitAutograd")
    return library


_LIBRARIES = [_register(namespace, schemas) for namespace, schemas in SCHEMAS.items()]


def _stock() -> torch._ops.OpOverload:
    return torch.ops.stock_of_a_test.attention_with_output.default


def _functionalised(operator: torch._ops.OpOverload, query, key, name="layers.0", **further) -> torch.Tensor:
    output = torch.empty_like(query)
    return auto_functionalized(operator, query=query, key=key, output=output, layer_name=name, **further)[1]


def _swapped(module: GraphModule, swap: AttentionSwap = SWAP) -> PassResult:
    result = swap(module.graph)
    module.recompile()
    return result


def test_a_functionalised_call_keeps_everything_but_its_operator():
    module = trace(lambda x, y: _functionalised(_stock(), x, y, scale=y, dep=x), X, Y)
    (before,) = (node for node in module.graph.nodes if node.target is auto_functionalized)
    unswapped, kwargs, meta = copy.deepcopy(module), dict(before.kwargs), dict(before.meta)
    assert _swapped(module) == PassResult("attention_swap", 1, 1)
    (after,) = (node for node in module.graph.nodes if node.target is auto_functionalized)
    assert after is before
    assert after.args == (torch.ops.ours_of_a_test.attention.default,)
    assert (after.kwargs, after.meta) == (kwargs, meta)
    assert kwargs.keys() == {"query", "key", "output", "layer_name", "scale", "dep"}
    for tokens in (1, 2, 300):
        inputs = [random(tokens, 8, dtype=torch.bfloat16, seed=seed) for seed in (3, 4)]
        assert torch.equal(module(*inputs), unswapped(*inputs))
    assert_sound(module, X, Y)


def test_a_call_that_writes_in_place_is_swapped_too():
    def function(x, y):
        output = torch.empty_like(x)
        _stock()(x, y, output, "layers.0", dep=y)
        return output

    module = trace(function, X, Y)
    unswapped = copy.deepcopy(module)
    assert operators(module)[-1] == "attention_with_output"
    assert _swapped(module) == PassResult("attention_swap", 1, 1)
    assert operators(module)[-1] == "attention"
    assert torch.equal(module(X, Y), unswapped(X, Y))


def test_the_second_form_of_functionalisation_is_swapped_too():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    output = graph.call_function(torch.empty_like, (x,))
    arguments = {"query": x, "key": y, "layer_name": "layers.0", "scale": None, "dep": None}
    bases = {"_output_base_index": 0, "_all_bases": [output]}
    call = graph.call_function(auto_functionalized_v2, (_stock(),), {**arguments, **bases})
    graph.output(call)
    assert SWAP(graph) == PassResult("attention_swap", 1, 1)
    assert call.args == (torch.ops.ours_of_a_test.attention.default,)
    assert call.kwargs == {**arguments, **bases}


def test_every_layer_is_swapped_and_running_the_pass_again_changes_nothing():
    def function(x, y):
        for layer in range(4):
            x = _functionalised(_stock(), x, y, f"layers.{layer}") + y
        return x

    module = trace(function, X, Y)
    unswapped = copy.deepcopy(module)
    assert _swapped(module) == PassResult("attention_swap", 4, 4)
    names = [node.kwargs["layer_name"] for node in module.graph.nodes if node.target is auto_functionalized]
    assert names == [f"layers.{layer}" for layer in range(4)]
    assert torch.equal(module(X, Y), unswapped(X, Y))
    before = str(module.graph)
    assert _swapped(module) == PassResult("attention_swap", 0, 0)
    assert str(module.graph) == before


def _untouched(module: GraphModule, swap: AttentionSwap = SWAP) -> PassResult:
    before = str(module.graph)
    result = swap(module.graph)
    assert str(module.graph) == before
    return result


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("latent_attention.default", "stock_of_a_test::latent_attention is not the attention that this pass knows"),
        ("attention_with_output.other", "overload other of stock_of_a_test::attention_with_output"),
    ],
)
def test_another_attention_of_the_namespace_is_a_candidate_left_alone_with_a_reason(name, why):
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.stock_of_a_test, packet), overload)
    result = _untouched(trace(lambda x, y: _functionalised(operator, x, y), X, Y))
    assert (result.matched, result.candidates) == (0, 1)
    assert len(result.refused) == 1 and f": {why}" in result.refused[0]


@pytest.mark.parametrize("short", [schema.partition("(")[0] for schema in SCHEMAS["ours_of_a_test"][1:]])
def test_an_operator_with_other_arguments_is_not_put_in_its_place(short):
    swap = AttentionSwap(SWAP.source, f"ours_of_a_test::{short}")
    result = _untouched(trace(lambda x, y: _functionalised(_stock(), x, y), X, Y), swap)
    assert (result.matched, result.candidates) == (0, 1)
    assert f"ours_of_a_test::{short} takes other arguments: " in result.refused[0]


def test_an_operator_that_nobody_registered_is_not_put_in_its_place():
    swap = AttentionSwap(SWAP.source, "ours_of_a_test::nothing")
    result = _untouched(trace(lambda x, y: _functionalised(_stock(), x, y), X, Y), swap)
    assert (result.matched, result.candidates) == (0, 1)
    assert result.refused == ("auto_functionalized: ours_of_a_test::nothing is not registered in this process",)


def test_attention_wrapped_in_an_unknown_way_is_a_candidate_left_alone_with_a_reason():
    def wrapper(operator, **arguments):
        raise NotImplementedError

    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(wrapper, (_stock(),), {"query": x}))
    before = str(graph)
    result = SWAP(graph)
    assert str(graph) == before
    assert (result.matched, result.candidates) == (0, 1)
    assert "is handed to" in result.refused[0] and "which this pass does not know" in result.refused[0]


NO_CANDIDATES = {
    "the cache update": lambda x, y: _functionalised(torch.ops.stock_of_a_test.cache_update.default, x, y),
    "attention of others": lambda x, y: _functionalised(torch.ops.others_of_a_test.attention_with_output.default, x, y),
    "torch's attention": lambda x, y: torch.nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "no attention": lambda x, y: x @ y.t(),
}


@pytest.mark.parametrize("function", NO_CANDIDATES.values(), ids=NO_CANDIDATES)
def test_anything_else_is_no_candidate(function):
    assert _untouched(trace(function, X, Y)) == PassResult("attention_swap", 0, 0)


def test_one_layer_that_does_not_fit_does_not_keep_others_from_being_swapped():
    def function(x, y):
        latent = torch.ops.stock_of_a_test.latent_attention.default
        return _functionalised(latent, _functionalised(_stock(), x, y), y)

    module = trace(function, X, Y)
    result = _swapped(module)
    assert (result.matched, result.candidates, len(result.refused)) == (1, 2, 1)
    held = [node.args[0]._schema.name for node in module.graph.nodes if node.target is auto_functionalized]
    assert held == ["ours_of_a_test::attention", "stock_of_a_test::latent_attention"]


class _OfATest(AttentionSwap):
    def __init__(self) -> None:
        super().__init__(SWAP.source, "ours_of_a_test::nothing")


def test_strict_stops_at_attention_that_cannot_be_swapped_and_says_why():
    graph = trace(lambda x, y: _functionalised(_stock(), x, y), X, Y).graph
    strict = PassPipeline({**to_dict(KVCompileConfig()), "strict": True}, [_OfATest])
    with pytest.raises(PassError, match=r"attention_swap matched none of 1 .*nothing is not registered"):
        strict(graph)


def test_it_runs_last_and_can_be_switched_off():
    assert PassPipeline(to_dict(KVCompileConfig())).order[-1] == "attention_swap"
    off = to_dict(resolve(overrides={"passes.attention_swap": False}, environ={}).config)
    assert PassPipeline(off).order == ("norm_quant", "swiglu_quant", "rotary")
    assert PassPipeline(off).uuid() != PassPipeline(to_dict(KVCompileConfig())).uuid()
