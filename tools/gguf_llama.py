"""A Hugging Face checkpoint directory out of a GGUF file of the llama architecture with a byte-level BPE."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF name -> Hugging Face name; {} is the layer number.
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL = 3  # llama.cpp's token type of tokens that never come from text, such as <|im_start|>

Metadata = dict[str, Any]


def convert(gguf: Path, directory: Path, advance: Callable[[int, int], None]) -> None:
    """Write config, weights (bf16) and tokenizer of `gguf` into the existing `directory`.

    `advance(done, total)` is called after every tensor. Raises ValueError, naming the fact, for a GGUF that is not a
    llama model with a byte-level BPE tokenizer of the SmolLM kind.
    """
    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    names = [tensor.name for tensor in reader.tensors]
    _write_json(directory / "config.json", model_config(metadata, tied="output.weight" not in names))
    _write_json(directory / "generation_config.json", _special_ids(metadata))
    tokenizer(metadata).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))

    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = unpermute(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermute(values, kv_heads)
        weights[hf_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
        advance(done, len(names))
    try:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what its Rust core makes of a full disk and the like
        raise OSError(errno.EIO, str(error)) from error
    # safetensors writes 0600 whatever the umask; a shared cache needs the permissions of the other files.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of a q or k projection, [heads * head_dim, hidden] -> the same shape.

    Hugging Face rotates row i of a head together with row i + head_dim / 2; llama.cpp rotates neighbours, so its
    converter moved those two rows to 2i and 2i + 1 of the head.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for an unknown tensor."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise ValueError(f"GGUF tensor {name!r} has no place in a LlamaForCausalLM checkpoint")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}"


def model_config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    """The contents of config.json. Raises ValueError if the architecture is not llama."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"GGUF architecture {metadata['general.architecture']!r}: only 'llama' can be converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": metadata["llama.block_count"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **_special_ids(metadata),
    }


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Digits one by one, then GPT-2's byte-level words, then BPE. Raises ValueError for any other tokenizer.

    The vocabulary lacks the bytes that its training text never had (13 that UTF-8 never uses, six control characters
    and the lead bytes of the unassigned planes 4 to 11): these are dropped, as the model's own tokenizer does.
    """
    family = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if family != ("gpt2", "smollm"):
        raise ValueError(f"GGUF tokenizer {'/'.join(family)}: only gpt2/smollm (byte-level BPE) can be converted")
    tokens = metadata["tokenizer.ggml.tokens"]
    result = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return result


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens by text, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class takes tokenizer.json as it is; a model's own class would rebuild it without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _special_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _shortest(value: float) -> float:
    """GGUF keeps float32: 9.999999747378752e-06 is what 1e-05 became, and is meant."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
