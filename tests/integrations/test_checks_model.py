"""Which models and which of vLLM's features are refused, and that nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompile.integrations.vllm.checks import ARCHITECTURES
from kvcompile.ops.kv8 import HEAD_SIZES

WITHOUT = "serve it without --compilation-config kvcompile"
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SUPPORTED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    # transformers gives a Mistral a window of 4096 unless its checkpoint says that it has none.
    "MistralForCausalLM": {**MISTRAL, "sliding_window": None},
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def test_the_supported_models_are_these():
    assert set(ARCHITECTURES) == set(SUPPORTED)
    assert HEAD_SIZES == (64, 80, 96, 128, 256)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_supported_architecture_is_accepted_with_every_supported_head_size(
    build, checkpoint, startup_lines, architecture, head_size
):
    config = build(model=checkpoint(**SUPPORTED[architecture], head_dim=head_size))
    assert config.model_config.architecture == architecture
    assert config.model_config.get_head_size() == head_size
    assert config.cache_config.cache_dtype == "int8_per_token_head"
    assert f"kv8 ({2 * (head_size + 4)} instead of {4 * head_size} bytes" in startup_lines[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}},
        {"num_key_value_heads": 2},
        {"tie_word_embeddings": True},
        {"dtype": "float16"},
        {**QWEN2, "sliding_window": 64, "use_sliding_window": False},
        {"attn_logit_softcapping": None},
        {"attn_logit_softcapping": 0.0},
        {"is_causal": True},
    ],
    ids=str,
)
def test_variants_that_are_full_causal_attention_are_accepted(build, checkpoint, changes):
    assert build(model=checkpoint(**changes)).cache_config.cache_dtype == "int8_per_token_head"


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_another_architecture_is_refused_with_the_supported_ones(refusal, checkpoint, changes, architecture):
    model = checkpoint(**changes)
    assert refusal(model=model) == (
        f"model {model}: architecture {architecture} is not supported; supported are LlamaForCausalLM, "
        f"MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM; {WITHOUT}"
    )


@pytest.mark.parametrize("head_size", [32, 48, 112, 120, 160, 192, 512])
def test_another_head_size_is_refused_with_the_supported_ones(refusal, checkpoint, head_size):
    model = checkpoint(head_dim=head_size)
    assert refusal(model=model) == (
        f"model {model}: head size {head_size} is not supported; supported are 64, 80, 96, 128, 256; {WITHOUT}"
    )


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({**MISTRAL, "sliding_window": 64}, "sliding-window attention"),
    "qwen2": ({**QWEN2, "sliding_window": 64, "use_sliding_window": True}, "sliding-window attention"),
    "alibi": ({"alibi": True}, "ALiBi"),
    "soft cap": ({"attn_logit_softcapping": 30.0}, "attention logit soft-capping"),
    "dual chunk": (
        {**QWEN2, "dual_chunk_attention_config": {"chunk_size": 64, "local_size": 16}},
        "dual-chunk attention",
    ),
    "bidirectional": ({"is_causal": False}, "bidirectional attention"),
}


@pytest.mark.parametrize(("changes", "what"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_model_with_other_attention_is_refused_by_name(refusal, checkpoint, changes, what):
    model = checkpoint(**changes)
    assert refusal(model=model) == (
        f"model {model}: has {what}, which is not supported; supported is full causal attention; {WITHOUT}"
    )


def test_a_sliding_window_that_the_user_disables_is_accepted(build, checkpoint):
    config = build(model=checkpoint(**MISTRAL, sliding_window=64), disable_sliding_window=True)
    assert config.model_config.max_model_len == 64
    assert config.cache_config.cache_dtype == "int8_per_token_head"


def test_a_pooling_runner_is_refused_by_name(refusal, llama):
    assert refusal(runner="pooling", convert="embed") == (
        f"model {llama}: has a pooling runner, which is not supported; supported is full causal attention; {WITHOUT}"
    )


FEATURES: dict[str, dict[str, Any]] = {
    "--enable-lora": {"enable_lora": True},
    "--speculative-config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "--kv-transfer-config": {
        "kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    },
    "--kv-offloading-size": {"kv_offloading_size": 1.0},
    "--decode-context-parallel-size": {"decode_context_parallel_size": 2},
    "--prefill-context-parallel-size": {"prefill_context_parallel_size": 2},
    "--kv-sharing-fast-prefill": {"kv_sharing_fast_prefill": True},
    "--calculate-kv-scales": {"calculate_kv_scales": True},
    "--kv-cache-dtype-skip-layers": {"kv_cache_dtype_skip_layers": ["0"]},
}


@pytest.mark.parametrize(("flag", "fields"), FEATURES.items(), ids=FEATURES)
def test_a_feature_that_the_int8_cache_does_not_support_is_refused_by_its_flag(refusal, flag, fields):
    assert refusal(**fields) == (
        f"{flag} does not work with the int8 KV cache of kvcompile; remove it, or keep vLLM's KV cache with "
        "-cc.kvcompile.kv8.enabled=false"
    )


def test_a_checkpoint_that_brings_its_own_speculative_configuration_is_refused(refusal, checkpoint, llama):
    speculator = checkpoint(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        speculators_config={
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(llama), "architectures": ["LlamaForCausalLM"]},
        },
        transformer_layer_config={},
    )
    assert refusal(model=speculator).startswith("--speculative-config does not work with the int8 KV cache")


@pytest.mark.parametrize("fields", [{"kv_cache_dtype": "bfloat16"}, {"attention_backend": "CPU_ATTN"}], ids=str)
def test_where_kv8_is_off_its_limits_do_not_hold(build, fields):
    config = build(**fields, calculate_kv_scales=True)
    assert config.cache_config.calculate_kv_scales is True


def test_the_custom_backend_of_another_plugin_is_refused_by_its_name(refusal, monkeypatch):
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    assert refusal() == (
        "another plugin has registered vLLM's CUSTOM attention backend (other.plugin.Backend); remove it, or set "
        "-cc.kvcompile.kv8.enabled=false"
    )


def test_the_custom_backend_of_another_plugin_is_left_alone_where_kv8_is_off(build, monkeypatch):
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    config = build(additional_config={"kvcompile": {"kv8.enabled": False}}, attention_backend="CUSTOM")
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.plugin.Backend"
