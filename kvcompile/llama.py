"""Which tensors a checkpoint of the Llama family has, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcompile.config import UsageError, shown

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_FLAGS = ("tie_word_embeddings", "attention_bias", "bias", "qkv_bias", "mlp_bias")
# transformers' defaults for a config.json without num_key_value_heads or head_dim; elsewhere they follow from the rest.
_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
_HEAD_DIM = {"Qwen3ForCausalLM": 128}
# Computed from config.json by whoever reads the checkpoint, and left out by vLLM.
_COMPUTED = re.compile(r".*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)")


class Expected(NamedTuple):
    """A tensor of an unquantised checkpoint. `linear`: its name without ".weight" inside a decoder layer, else None."""

    name: str
    shape: tuple[int, ...]
    linear: str | None


def expected(config: Mapping[str, Any], where: str) -> Iterator[Expected]:
    """Every tensor of the checkpoint with this config.json, in the order of the model: embeddings, layers, head.

    A generator: a number of layers that is out of all proportion costs nothing. `where` names the configuration in the
    UsageError that is raised for a size that is not a positive whole number, and for a flag that is neither true nor
    false.
    """
    architecture = (config.get("architectures") or [None])[0]
    hidden, wide, layers, heads, vocabulary = (
        _size(config, key, where)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    )
    kv_heads = _size(config, "num_key_value_heads", where, _KV_HEADS.get(architecture, heads), null=heads)
    if heads > hidden and config.get("head_dim") is None:
        raise UsageError(f"{where}: num_attention_heads is {heads} and hidden_size {hidden}; allowed is no more heads")
    head = _size(config, "head_dim", where, _HEAD_DIM.get(architecture, hidden // heads), null=hidden // heads)
    linears = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for key in _FLAGS:
        _refuse_no_flag(config, key, where)
    biased = _biased(config, architecture)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if architecture == "Qwen3ForCausalLM":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    yield Expected("model.embed_tokens.weight", (vocabulary, hidden), None)
    for index in range(layers):
        layer = f"model.layers.{index}"
        for part, shape in linears.items():
            yield Expected(f"{layer}.{part}.weight", shape, f"{layer}.{part}")
            if part in biased:
                yield Expected(f"{layer}.{part}.bias", shape[:1], None)
        for norm, width in norms.items():
            yield Expected(f"{layer}.{norm}.weight", (width,), None)
    yield Expected("model.norm.weight", (hidden,), None)
    if not config.get("tie_word_embeddings"):
        yield Expected("lm_head.weight", (vocabulary, hidden), None)


def is_superfluous(name: str) -> bool:
    """Whether a tensor beyond the expected ones is known to be harmless: vLLM computes it, or takes the embeddings."""
    return name == "lm_head.weight" or _COMPUTED.fullmatch(name) is not None


def _biased(config: Mapping[str, Any], architecture: str | None) -> set[str]:
    """The linears of a layer that have a bias."""
    qkv, out = {f"self_attn.{x}_proj" for x in "qkv"}, {"self_attn.o_proj"}
    if architecture == "Qwen2ForCausalLM":
        return qkv
    attention = config.get("attention_bias") or config.get("bias")  # the second is InternLM's name of it
    biased = (qkv if config.get("qkv_bias", attention) else set()) | (out if attention else set())
    if architecture != "Qwen3ForCausalLM" and config.get("mlp_bias"):
        biased |= {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    return biased


def _refuse_no_flag(config: Mapping[str, Any], key: str, where: str) -> None:
    """Raise UsageError unless `key` is true, false, null or absent: the text "false" would be taken for true."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{where}: {key} is {shown(value)}; allowed are true and false; correct it")


def _size(
    config: Mapping[str, Any], key: str, where: str, absent: int | None = None, *, null: int | None = None
) -> int:
    """The positive whole number under `key`; `absent` stands in for no such key, `null` for an explicit null."""
    value = config.get(key, absent)
    if value is None:
        value = null
    if type(value) is not int or value < 1:
        raise UsageError(f"{where}: {key} is {value!r}; allowed is a whole number from 1; get the checkpoint again")
    return value
