"""A model of the shapes of Llama-3.1-8B, with few layers and a small vocabulary."""

from __future__ import annotations

from typing import Any

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 32000
EPSILON = 1e-5


def llama_8b(layers: int) -> dict[str, Any]:
    """Its config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": EPSILON,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
