"""config.json of named models, for engines whose weights are made up: a benchmark of speed needs no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}


def folder_of(model: str, scratch: Path) -> Path:
    """The folder of a checkpoint, or one in `scratch` with the config.json of a named shape. Raises UsageError."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if model not in SHAPES:
        known = ", ".join(SHAPES)
        raise UsageError(f"model {model}: neither a folder with a config.json nor a known shape; shapes are {known}")
    folder = scratch / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return folder
