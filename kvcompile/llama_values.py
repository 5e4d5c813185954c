"""What else config.json of the Llama family says, and whether vLLM can serve it: activation, norms, positions, dtype.

vLLM finds such a value out after the checkpoint was made, or not at all: a rope_theta of 0 gives text without a sense.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from kvcompile.config import UsageError, shown

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("bfloat16", "float16", "float32", "half", "float")

# Types that transformers, by which vLLM reads the file, asks for: in words, and whether null will do.
_FLAG, _FLOAT, _ID, _IDS = "true or false", "a decimal number", "a whole number", "a whole number, a list of them"
_TYPES = {
    "use_cache": (_FLAG, False),
    "tie_word_embeddings": (_FLAG, False),
    "initializer_range": (_FLOAT, False),
    "bos_token_id": (_ID, True),
    "pad_token_id": (_ID, True),
    "eos_token_id": (_IDS, True),
}
_WINDOW = {"sliding_window": (_ID, True)}
_WINDOWS = {**_WINDOW, "use_sliding_window": (_FLAG, False), "max_window_layers": (_ID, False)}
_TYPES_OF = {
    "LlamaForCausalLM": {
        "attention_bias": (_FLAG, False),
        "mlp_bias": (_FLAG, False),
        "pretraining_tp": (_ID, True),
    },
    "MistralForCausalLM": _WINDOW,
    "Qwen2ForCausalLM": _WINDOWS,
    "Qwen3ForCausalLM": {**_WINDOWS, "attention_bias": (_FLAG, False)},
}

_NUMBER = "a number above 0"
_COUNT = "a whole number from 1"
_FACTORS = "a list of numbers above 0"
# What each kind of rope_scaling needs, and what else it may have; all of it by the rules in _ROPE_VALUES.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_VALUES = {
    "rope_theta": _NUMBER,
    "factor": _NUMBER,
    "low_freq_factor": _NUMBER,
    "high_freq_factor": _NUMBER,
    "attention_factor": _NUMBER,
    "attn_factor": _NUMBER,
    "beta_fast": _NUMBER,
    "beta_slow": _NUMBER,
    "original_max_position_embeddings": _COUNT,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}
_ROPE_OF_ALL = {"rope_theta", "partial_rotary_factor"}  # these scale nothing, and need no rope_type


def refuse_unusable(config: Mapping[str, Any], where: str) -> None:
    """Raise UsageError for a value that vLLM, or transformers under it, cannot serve. An absent key is a default.

    `where` names the configuration. Its sizes are `llama.expected`'s affair, and are taken to be right.
    """
    architecture = config["architectures"][0]
    _refuse_unless(
        config, where, "model_type", {MODEL_TYPES[architecture]}, f"{MODEL_TYPES[architecture]} for {architecture}"
    )
    if "hidden_act" in config:
        _refuse_unless(config, where, "hidden_act", {"silu"}, "silu")
    for key in ("torch_dtype", "dtype"):
        if config.get(key) is not None:
            _refuse_unless(config, where, key, set(DTYPES), ", ".join(DTYPES))
    eps = config.get("rms_norm_eps", 1e-6)
    if not (type(eps) is float and math.isfinite(eps) and eps >= 0):  # transformers takes no whole number either
        _refuse(where, "rms_norm_eps", eps, "a finite decimal number from 0, such as 1e-05")
    if "max_position_embeddings" in config and not _fits(config["max_position_embeddings"], _COUNT):
        _refuse(where, "max_position_embeddings", config["max_position_embeddings"], _COUNT)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        _refuse(where, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")
    if (head := config.get("head_dim")) is not None and head % 2:
        _refuse(where, "head_dim", head, "an even number, as positions turn values in pairs")
    for key, (allowed, null) in (_TYPES | _TYPES_OF[architecture]).items():
        if key in config and not (config[key] is None and null) and not _is(config[key], allowed):
            _refuse(where, key, config[key], f"{allowed}{' or null' if null else ''}")
    _refuse_rope(config, where)


def _refuse_rope(config: Mapping[str, Any], where: str) -> None:
    """rope_parameters is what transformers 5 calls rope_scaling; it goes before rope_theta beside it."""
    tables = [key for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None]
    for key in tables:
        _refuse_rope_table(config[key], f"{where}: {key}", where, key)
    has_theta = any("rope_theta" in config[key] for key in tables)
    theta = config.get("rope_theta", 10000.0)
    if not _fits(theta, _NUMBER) and not (theta is None and has_theta):
        _refuse(where, "rope_theta", theta, _NUMBER)
    turned = config.get("partial_rotary_factor")
    if turned is not None and not (_fits(turned, _NUMBER) and turned <= 1):
        _refuse(where, "partial_rotary_factor", turned, "a number above 0 and up to 1")


def _refuse_rope_table(table: Any, named: str, where: str, key: str) -> None:
    types = ", ".join(_ROPE_NEEDS)
    if not isinstance(table, Mapping):
        _refuse(where, key, table, f"null and a table with a rope_type ({types})")
    kinds = [table[name] for name in ("rope_type", "type") if name in table]
    if not kinds and table.keys() - _ROPE_OF_ALL:
        raise UsageError(f"{named} has no rope_type; allowed are {types}; correct it")
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        raise UsageError(f"{named}.rope_type is {shown(kind)}; allowed are {types}; correct it")
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise UsageError(f"{named}.rope_type is {shown(kind)} and its type {shown(kinds[1])}; leave one of them out")
    if missing := next((name for name in _ROPE_NEEDS[kind] if name not in table), None):
        raise UsageError(f"{named} has no {missing}, which its rope_type {kind} needs; correct it")
    for name, allowed in _ROPE_VALUES.items():
        needed = name in _ROPE_NEEDS[kind] or name == "rope_theta"
        if name in table and not _fits(table[name], allowed) and (needed or table[name] is not None):
            _refuse(where, f"{key}.{name}", table[name], allowed)
    if kind == "llama3" and table["high_freq_factor"] <= table["low_freq_factor"]:
        _refuse(
            where,
            f"{key}.high_freq_factor",
            table["high_freq_factor"],
            f"a number above low_freq_factor, {table['low_freq_factor']}",
        )


def _is(value: Any, allowed: str) -> bool:
    """By type alone."""
    if isinstance(value, list):
        return allowed == _IDS and all(_is(each, _ID) for each in value)
    return type(value) is {_FLAG: bool, _FLOAT: float}.get(allowed, int)


def _fits(value: Any, allowed: str) -> bool:
    if allowed == _COUNT:
        return type(value) is int and value >= 1
    if allowed == _FACTORS:
        return isinstance(value, list) and bool(value) and all(_fits(each, _NUMBER) for each in value)
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # a whole number of JSON may be beyond it


def _refuse_unless(config: Mapping[str, Any], where: str, key: str, values: set[str], allowed: str) -> None:
    value = config.get(key)
    if not isinstance(value, str) or value not in values:
        _refuse(where, key, value, allowed)


def _refuse(where: str, key: str, value: Any, allowed: str) -> None:
    raise UsageError(f"{where}: {key} is {shown(value)}; allowed is {allowed}; correct it")
