"""GGUF to Hugging Face, on synthetic tensors and a two-layer GGUF file whose every size differs from SmolLM2's."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvcompile.tools import gguf_llama

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 8, 96, 2
TOKENS = ["<|a|>", "<|b|>", "<|c|>", "<|d|>", *"0123456789abcdexyz", "Ġ", "Ċ", "ab", "abc", "Ġa", "12"]
MERGES = ["a b", "ab c", "Ġ a", "1 2"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def _permuted(rows, heads):
    """llama.cpp's order by its definition: rows i and i + head_dim / 2 of a head become its rows 2i and 2i + 1."""
    result, head_dim = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            result[head * head_dim + 2 * i] = rows[head * head_dim + i]
            result[head * head_dim + 2 * i + 1] = rows[head * head_dim + i + head_dim // 2]
    return result


def _hf_weights(*, tied):
    """Random weights under their Hugging Face names, exact in bf16."""
    generator = torch.Generator().manual_seed(7)
    sizes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        sizes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        for name, size in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }.items():
            sizes[f"model.layers.{layer}.{name}.weight"] = size
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _write_gguf(path, weights, *, arch="llama", pre="smollm", extra=()):
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 3e-6)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3] * 4 + [1] * (len(TOKENS) - 4))
    writer.add_array("tokenizer.ggml.merges", MERGES)
    for number, name in enumerate(("bos", "eos", "unknown", "padding")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    for name, weight in weights.items():
        values = weight.float().numpy()
        if "q_proj" in name:
            values = _permuted(values, HEADS)
        elif "k_proj" in name:
            values = _permuted(values, KV_HEADS)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values)
    for name in extra:
        writer.add_tensor(name, np.zeros((HIDDEN,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _convert(tmp_path, **options):
    tied = options.pop("tied", True)
    out = tmp_path / "out"
    out.mkdir()
    calls = []
    weights = _hf_weights(tied=tied)
    source = _write_gguf(tmp_path / "m.gguf", weights, **options)
    gguf_llama.convert(source, out, lambda *call: calls.append(call))
    return out, weights, calls


def _json(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("heads", "head_dim", "hidden"), [(1, 2, 1), (3, 4, 5), (9, 64, 7), (2, 6, 576)])
def test_unpermute_undoes_the_definition_of_the_permutation(heads, head_dim, hidden):
    rows = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    np.testing.assert_array_equal(gguf_llama.unpermute(_permuted(rows, heads), heads), rows)


def test_unpermute_of_one_head_of_six_rows_reads_even_rows_first():
    rows = np.arange(6, dtype=np.float32)[:, None]
    assert gguf_llama.unpermute(rows, 1)[:, 0].tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_arrives_under_its_name_bit_for_bit(tmp_path, tied):
    out, weights, calls = _convert(tmp_path, tied=tied)
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    assert {name for name in weights if not torch.equal(found[name], weights[name])} == set()
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    assert calls == [(done, len(weights)) for done in range(1, len(weights) + 1)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_says_what_the_file_says(tmp_path, tied):
    out, _, _ = _convert(tmp_path, tied=tied)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    assert _json(out / "config.json") == special | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "vocab_size": len(TOKENS),
        "rope_theta": 500000.0,
        "rms_norm_eps": 3e-6,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    assert _json(out / "generation_config.json") == special


def test_the_tokenizer_config_names_special_tokens_and_carries_the_template(tmp_path):
    out, _, _ = _convert(tmp_path)
    assert _json(out / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|a|>",
        "eos_token": "<|b|>",
        "unk_token": "<|c|>",
        "pad_token": "<|d|>",
        "chat_template": TEMPLATE,
    }


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc ac", ["abc", "Ġa", "c"]),
        ("12", ["1", "2"]),  # digits stand alone although a merge would join them
        ("a\n", ["a", "Ċ"]),
        ("<|b|>ab<|x", ["<|b|>", "ab", "x"]),  # a token that is whole is special; unknown bytes are dropped
    ],
)
def test_the_tokenizer_splits_digits_then_words_then_merges(tmp_path, text, tokens):
    out, _, _ = _convert(tmp_path)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma"}, "GGUF architecture 'gemma': only 'llama' can be converted"),
        ({"pre": "llama-bpe"}, "GGUF tokenizer gpt2/llama-bpe: only gpt2/smollm"),
        ({"extra": ["blk.0.attn_q.bias"]}, "GGUF tensor 'blk.0.attn_q.bias' has no place in a LlamaForCausalLM"),
        ({"extra": ["rope_freqs.weight"]}, "GGUF tensor 'rope_freqs.weight' has no place in a LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError) as caught:
        _convert(tmp_path, **options)
    assert str(caught.value).startswith(message)
