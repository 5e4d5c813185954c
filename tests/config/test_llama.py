"""Which tensors a checkpoint of the Llama family has, by its config.json."""

import pytest

from kvcompile.config import UsageError
from kvcompile.llama import expected, is_superfluous

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def _shapes(**changes):
    return {tensor.name: tensor.shape for tensor in expected({**CONFIG, **changes}, "config.json")}


def _biased(**changes):
    return {name.split(".")[-2] for name in _shapes(**changes) if name.endswith(".bias")}


def test_a_llama_has_these_tensors_of_these_shapes():
    shapes = _shapes(num_hidden_layers=1)
    assert list(shapes.items()) == [
        ("model.embed_tokens.weight", (1000, 256)),
        ("model.layers.0.self_attn.q_proj.weight", (256, 256)),
        ("model.layers.0.self_attn.k_proj.weight", (128, 256)),
        ("model.layers.0.self_attn.v_proj.weight", (128, 256)),
        ("model.layers.0.self_attn.o_proj.weight", (256, 256)),
        ("model.layers.0.mlp.gate_proj.weight", (640, 256)),
        ("model.layers.0.mlp.up_proj.weight", (640, 256)),
        ("model.layers.0.mlp.down_proj.weight", (256, 640)),
        ("model.layers.0.input_layernorm.weight", (256,)),
        ("model.layers.0.post_attention_layernorm.weight", (256,)),
        ("model.norm.weight", (256,)),
        ("lm_head.weight", (1000, 256)),
    ]


def test_the_linears_of_a_layer_are_named():
    linears = [tensor.linear for tensor in expected(CONFIG, "config.json") if tensor.linear]
    assert len(linears) == len(set(linears)) == 14
    assert all(linear.startswith("model.layers.") and linear.endswith("_proj") for linear in linears)


@pytest.mark.parametrize(("tied", "has"), [(True, False), (False, True), (None, True)])
def test_tied_embeddings_serve_as_the_head(tied, has):
    assert ("lm_head.weight" in _shapes(tie_word_embeddings=tied)) == has


def test_a_head_may_be_wider_than_its_share_of_the_hidden_size():
    shapes = _shapes(head_dim=96)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (384, 256)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (256, 384)
    assert shapes["model.layers.1.self_attn.v_proj.weight"] == (192, 256)


@pytest.mark.parametrize(
    ("name", "kv_rows"), [("LlamaForCausalLM", 4 * 64), ("MistralForCausalLM", 8 * 64), ("Qwen3ForCausalLM", 32 * 128)]
)
def test_what_a_config_leaves_out_is_what_transformers_puts_there(name, kv_rows):
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    shapes = {tensor.name: tensor.shape for tensor in expected({**config, "architectures": [name]}, "config.json")}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (kv_rows, 256)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_null_means_as_many_kv_heads_as_heads_and_heads_that_share_the_hidden_size(name):
    shapes = _shapes(architectures=[name], num_key_value_heads=None, head_dim=None)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (256, 256)


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({}, set()),
        ({"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"qkv_bias": True}, {"q_proj", "k_proj", "v_proj"}),
        ({"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"q_proj", "k_proj", "v_proj"}),
        ({"architectures": ["Qwen3ForCausalLM"]}, set()),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_biases_are_those_of_the_architecture_and_its_options(changes, biased):
    assert _biased(**changes) == biased


def test_a_qwen3_normalises_each_head():
    shapes = _shapes(architectures=["Qwen3ForCausalLM"])
    assert (
        shapes["model.layers.1.self_attn.q_norm.weight"] == shapes["model.layers.1.self_attn.k_norm.weight"] == (128,)
    )


@pytest.mark.parametrize("value", [0, -1, "2", 2.0, True, [2]])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads", "head_dim"])
def test_a_size_that_is_no_positive_whole_number_is_refused_by_its_key(key, value):
    with pytest.raises(UsageError) as caught:
        _shapes(**{key: value})
    assert str(caught.value) == (
        f"config.json: {key} is {value!r}; allowed is a whole number from 1; get the checkpoint again"
    )


@pytest.mark.parametrize("value", ["false", "true", 0, 1, []])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "bias", "qkv_bias", "mlp_bias"])
def test_a_flag_that_is_neither_true_nor_false_is_refused(key, value):
    with pytest.raises(UsageError) as caught:
        _shapes(**{key: value})
    assert str(caught.value) == (f"config.json: {key} is {value!r}; allowed are true and false; correct it")


def test_a_missing_size_is_refused():
    with pytest.raises(UsageError, match=r"^config\.json: intermediate_size is None; "):
        _shapes(intermediate_size=None)


def test_any_number_of_layers_costs_nothing_before_they_are_asked_for():
    tensors = expected({**CONFIG, "num_hidden_layers": 10**18}, "config.json")
    assert next(tensors).name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "superfluous"),
    [
        ("lm_head.weight", True),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", True),
        ("model.layers.3.self_attn.rotary_emb.cos_cached", True),
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("lm_head.bias", False),
    ],
)
def test_what_may_be_there_besides(name, superfluous):
    assert is_superfluous(name) == superfluous
