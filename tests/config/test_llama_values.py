"""Which values of config.json, beside its sizes, a Llama-family model can be served with."""

import math

import pytest

from kvcompile.config import UsageError
from kvcompile.llama_values import refuse_unusable

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = "default, linear, dynamic, yarn, llama3, longrope"
DTYPES = "bfloat16, float16, float32, half, float"
EPS = "a finite decimal number from 0, such as 1e-05"
ABOVE = "a number above 0"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "silu", "torch_dtype": "half", "dtype": None},
        {"rms_norm_eps": 0.0},
        {"use_cache": True, "bos_token_id": None, "eos_token_id": [1, 2], "pad_token_id": -1, "pretraining_tp": 1},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": None},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 500000, "max_position_embeddings": 1},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2] * 32}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"partial_rotary_factor": 1},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"num_key_value_heads": None, "head_dim": None},
    ],
)
def test_values_that_can_be_served_are_taken(changes):
    refuse_unusable({**CONFIG, **changes}, "config.json")


@pytest.mark.parametrize(
    ("changes", "field", "value", "allowed"),
    [
        ({"model_type": "mistral"}, "model_type", "'mistral'", "llama for LlamaForCausalLM"),
        ({"model_type": None}, "model_type", "none", "llama for LlamaForCausalLM"),
        ({"model_type": ["llama"]}, "model_type", "['llama']", "llama for LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"]}, "model_type", "'llama'", "mistral for MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "silu"),
        ({"hidden_act": None}, "hidden_act", "none", "silu"),
        ({"torch_dtype": "nonsense"}, "torch_dtype", "'nonsense'", DTYPES),
        ({"torch_dtype": 16}, "torch_dtype", "16", DTYPES),
        ({"dtype": "int8"}, "dtype", "'int8'", DTYPES),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", "'1e-5'", EPS),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps", "-1e-05", EPS),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps", "nan", EPS),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps", "inf", EPS),
        ({"rms_norm_eps": 1}, "rms_norm_eps", "1", EPS),
        ({"rms_norm_eps": None}, "rms_norm_eps", "none", EPS),
        ({"rope_theta": 0}, "rope_theta", "0", ABOVE),
        ({"rope_theta": -1e4}, "rope_theta", "-10000.0", ABOVE),
        ({"rope_theta": math.nan}, "rope_theta", "nan", ABOVE),
        ({"rope_theta": math.inf}, "rope_theta", "inf", ABOVE),
        ({"rope_theta": 10**400}, "rope_theta", f"1{'0' * 76}...", ABOVE),
        ({"rope_theta": "10000"}, "rope_theta", "'10000'", ABOVE),
        ({"rope_theta": True}, "rope_theta", "true", ABOVE),
        ({"rope_theta": None}, "rope_theta", "none", ABOVE),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta", "0", ABOVE),
        ({"max_position_embeddings": 0}, "max_position_embeddings", "0", "a whole number from 1"),
        ({"max_position_embeddings": None}, "max_position_embeddings", "none", "a whole number from 1"),
        ({"max_position_embeddings": 2048.0}, "max_position_embeddings", "2048.0", "a whole number from 1"),
        ({"use_cache": "yes"}, "use_cache", "'yes'", "true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings", "none", "true or false"),
        ({"mlp_bias": None}, "mlp_bias", "none", "true or false"),
        ({"initializer_range": 1}, "initializer_range", "1", "a decimal number"),
        ({"bos_token_id": "x"}, "bos_token_id", "'x'", "a whole number or null"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id", "[1, 'x']", "a whole number, a list of them or null"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": "x"},
            "sliding_window",
            "'x'",
            "a whole number or null",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3", "a divisor of num_attention_heads, which is 4"),
        ({"head_dim": 63}, "head_dim", "63", "an even number, as positions turn values in pairs"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "1.5", "a number above 0 and up to 1"),
        ({"rope_scaling": "linear"}, "rope_scaling", "'linear'", f"null and a table with a rope_type ({KINDS})"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling.rope_type", "'ntk'", KINDS),
        ({"rope_scaling": {"rope_type": None}}, "rope_scaling.rope_type", "none", KINDS),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type", "['linear']", KINDS),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor", "'x'", ABOVE),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor", "none", ABOVE),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}}, "rope_scaling.beta_fast", "'x'", ABOVE),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0.5}},
            "rope_scaling.original_max_position_embeddings",
            "0.5",
            "a whole number from 1",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor",
            "1.0",
            "a number above low_freq_factor, 1.0",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, "x"], "long_factor": [1.0]}},
            "rope_scaling.short_factor",
            "[1.0, 'x']",
            "a list of numbers above 0",
        ),
    ],
)
def test_a_value_that_cannot_be_served_is_named_with_what_is_allowed(changes, field, value, allowed):
    are = "are" if field.endswith("rope_type") else "is"
    assert _refused(changes).replace(f"config.json.{field}", f"config.json: {field}") == (
        f"config.json: {field} is {value}; allowed {are} {allowed}; correct it"
    )


def test_an_absent_model_type_is_refused():
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    with pytest.raises(UsageError, match="model_type is none; allowed is llama for LlamaForCausalLM"):
        refuse_unusable(config, "config.json")


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"factor": 2.0}, f"has no rope_type; allowed are {KINDS}; correct it"),
        ({"type": "linear"}, "has no factor, which its rope_type linear needs; correct it"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "has no low_freq_factor, which its rope_type llama3 needs; correct it",
        ),
    ],
)
def test_a_rope_scaling_that_lacks_something_is_refused(scaling, said):
    assert _refused({"rope_scaling": scaling}) == f"config.json: rope_scaling {said}"


def test_two_kinds_of_rope_scaling_at_once_are_refused():
    assert _refused({"rope_scaling": {"rope_type": "dynamic", "type": "linear", "factor": 2.0}}) == (
        "config.json: rope_scaling.rope_type is 'dynamic' and its type 'linear'; leave one of them out"
    )


def _refused(changes):
    with pytest.raises(UsageError) as caught:
        refuse_unusable({**CONFIG, **changes}, "config.json")
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message
