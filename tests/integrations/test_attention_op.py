"""The operator that takes the place of vLLM's attention operator, and when it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.config import CompilationConfig
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import attention
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvcompile.integrations.vllm import attention_op
from kvcompile.integrations.vllm.attention import KV8AttentionBackend
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY
from kvcompile.passes.attention_swap import AttentionSwap
from kvcompile.passes.pipeline import PassResult
from kvcompile.presets import compilation_config

OURS = torch.ops.kvcompile.pruned_kv8_attention.default
STOCK = torch.ops.vllm.unified_attention_with_output.default
NAME, REPLACES = "kvcompile::pruned_kv8_attention", "vllm::unified_attention_with_output"


def test_its_schema_is_that_of_vllms_operator():
    assert str(OURS._schema).partition("(")[2] == str(STOCK._schema).partition("(")[2]
    assert (OURS._schema.name, STOCK._schema.name) == (NAME, REPLACES)
    assert [a.name for a in OURS._schema.arguments if a.is_write] == ["output", "output_block_scale"]


def test_the_pass_knows_both_by_their_names():
    assert (AttentionSwap().source, AttentionSwap().target) == (REPLACES, NAME)
    assert (attention_op.REPLACES, attention_op.NAME) == (REPLACES, NAME)


def test_the_pass_puts_it_in_the_place_of_vllms_operator():
    graph = torch.fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("query", "key", "value", "output", "layer_name")}
    further = {"output_scale": None, "output_block_scale": None, "kv_cache_dummy_dep": None}
    call = graph.call_function(auto_functionalized, (STOCK,), {**inputs, **further})
    graph.output(call)
    assert AttentionSwap()(graph) == PassResult("attention_swap", 1, 1)
    assert call.args == (OURS,)
    assert call.kwargs == {**inputs, **further}


class _Impl:
    """An attention implementation that keeps what it is called with and writes `query + 1`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, layer, query, key, value, kv_cache, metadata, output, output_scale, output_block_scale):
        self.calls.append((layer, query, key, value, kv_cache, metadata, output_scale, output_block_scale))
        output.copy_(query + 1)


def _layer(backend: type) -> SimpleNamespace:
    return SimpleNamespace(attn_backend=backend, impl=_Impl(), kv_cache=torch.zeros(3))


def _context(layers: dict[str, SimpleNamespace]) -> ForwardContext:
    return ForwardContext(
        no_compile_layers=layers,
        attn_metadata={name: f"metadata of {name}" for name in layers},
        slot_mapping={},
    )


@pytest.mark.parametrize("operator", [OURS, STOCK], ids=["ours", "stock"])
def test_it_finds_the_layer_by_name_in_the_forward_context_as_vllms_does(operator):
    layers = {f"layers.{i}.attn": _layer(KV8AttentionBackend) for i in range(2)}
    query, key, value = (torch.full((4, 2, 8), float(i)) for i in range(3))
    output, scale = torch.zeros(4, 2, 8), torch.ones(1)
    with override_forward_context(_context(layers)):
        result = operator(query, key, value, output, _encode_layer_name("layers.1.attn"), output_scale=scale)
    assert result is None
    assert torch.equal(output, query + 1)
    assert layers["layers.0.attn"].impl.calls == []
    ((layer, *tensors, metadata, given, block),) = layers["layers.1.attn"].impl.calls
    assert layer is layers["layers.1.attn"]
    for tensor, wanted in zip(tensors, (query, key, value, layer.kv_cache), strict=True):
        assert tensor.data_ptr() == wanted.data_ptr()
    assert (metadata, given.item(), block) == ("metadata of layers.1.attn", 1.0, None)


def test_a_layer_of_another_backend_is_refused_by_name():
    layers = {"layers.0.attn": _layer(CPUAttentionBackend)}
    tensors = [torch.zeros(4, 2, 8) for _ in range(4)]
    with (
        override_forward_context(_context(layers)),
        pytest.raises(RuntimeError, match=r"for layer layers\.0\.attn, whose attention backend is CPU_ATTN and not"),
    ):
        OURS(*tensors, _encode_layer_name("layers.0.attn"))
    assert layers["layers.0.attn"].impl.calls == []


def test_it_wraps_what_vllm_wraps_around_its_own():
    # KV connectors hook into vLLM's function by a decorator: the operator must go through it.
    assert attention.unified_attention_with_output.__wrapped__.__name__ == "unified_attention_with_output"


# --- where graphs are split -----------------------------------------------------------------------------------------


def _splitting_ops(build, **fields: Any) -> list[str]:
    return build(compilation_config=compilation_config(**fields)).compilation_config.splitting_ops


def test_with_graph_partition_inductor_cuts_its_graphs_at_it_as_at_vllms(build):
    assert _splitting_ops(build, use_inductor_graph_partition=True) == [*CompilationConfig._attention_ops, NAME]


def test_splitting_ops_of_the_user_get_it_beside_vllms_and_only_once(build):
    given = ["vllm::mamba_mixer", REPLACES]
    fields = {"use_inductor_graph_partition": True}
    assert _splitting_ops(build, **fields, splitting_ops=given) == [*given, NAME]
    assert _splitting_ops(build, **fields, splitting_ops=[f"{REPLACES}.default"]) == [f"{REPLACES}.default", NAME]
    assert _splitting_ops(build, **fields, splitting_ops=[REPLACES, NAME]) == [REPLACES, NAME]
    # Not cut at vLLM's operator, so neither at this one.
    assert _splitting_ops(build, **fields, splitting_ops=["vllm::mamba_mixer"]) == ["vllm::mamba_mixer"]
    assert _splitting_ops(build, **fields, splitting_ops=[]) == []
    assert given == ["vllm::mamba_mixer", REPLACES]


def test_piecewise_graphs_are_split_where_vllm_splits_them(build):
    assert NAME not in _splitting_ops(build)
    assert REPLACES in _splitting_ops(build)


def test_what_vllm_concludes_from_its_splitting_ops_stays(build):
    compilation = build(compilation_config=compilation_config(use_inductor_graph_partition=True)).compilation_config
    assert compilation.splitting_ops_contain_attention()
    assert compilation.is_attention_compiled_piecewise()
    assert NAME not in CompilationConfig._attention_ops


def test_vllms_own_fusion_of_attention_splits_as_it_does_by_itself(build):
    fusion = {"pass_config": {"fuse_attn_quant": True}}
    assert _splitting_ops(build, **fusion) == []
    partitioned = _splitting_ops(build, **fusion, use_inductor_graph_partition=True)
    assert partitioned == [*CompilationConfig._attention_ops, NAME]


# --- whether the pass runs ------------------------------------------------------------------------------------------


def _order(build, **fields: Any) -> tuple[str, ...]:
    return build(**fields).compilation_config.inductor_compile_config[PASS_KEY].pipeline.order


def _options(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"kvcompile": options}}


WITHOUT_KV8 = {
    "switched off": _options(kv8={"enabled": False}),
    "another cache dtype": {"kv_cache_dtype": "bfloat16"},
    "another backend": {"attention_backend": "CPU_ATTN"},
    "off and custom": {**_options(kv8={"enabled": False}), "attention_backend": "CUSTOM"},
}


def test_with_kv8_the_swap_is_in_the_list(build):
    assert _order(build) == ("norm_quant", "swiglu_quant", "rotary", "attention_swap")


@pytest.mark.parametrize("fields", WITHOUT_KV8.values(), ids=WITHOUT_KV8)
def test_where_attention_is_not_ours_nothing_is_swapped(build, fields):
    assert _order(build, **fields) == ("norm_quant", "swiglu_quant", "rotary")


def test_with_vllms_triton_backend_on_the_int8_cache_nothing_is_swapped(build, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvcompile.integrations.vllm import preset

    monkeypatch.setattr(preset, "_KV8_BACKENDS", {*preset._KV8_BACKENDS, AttentionBackendEnum.TRITON_ATTN})
    config = build(attention_backend="TRITON_ATTN")
    assert config.cache_config.cache_dtype == "int8_per_token_head"
    ours = config.compilation_config.inductor_compile_config[PASS_KEY]
    assert ours.pipeline.order == ("norm_quant", "swiglu_quant", "rotary")
    # The same options and the same graphs, but another outcome: another identity.
    assert ours.uuid() != build().compilation_config.inductor_compile_config[PASS_KEY].uuid()


def test_the_switch_takes_it_out_of_the_list(build):
    assert _order(build, **_options(passes={"attention_swap": False})) == ("norm_quant", "swiglu_quant", "rotary")
