"""Small W4A8 checkpoints with real tensors, and what each of them has by its configuration."""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.ops.w4a8 import quantize

HIDDEN, INTERMEDIATE, HEAD, VOCABULARY = 128, 192, 64, 512
LINEARS = {
    "self_attn.q_proj": (2 * HEAD, HIDDEN),
    "self_attn.k_proj": (HEAD, HIDDEN),
    "self_attn.v_proj": (HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 2 * HEAD),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

# Of the small Llama of conftest.py as it is: hidden 128 (2 heads of 64), intermediate 256.
QUANTISED: dict[str, Any] = {
    "quant_method": "kvcompile_w4a8",
    "format": 1,
    "group_size": 128,
    "group_sizes": {"128": 128, "256": 64},
    "method": "search",
    "modules_to_not_convert": ["lm_head"],
}

Tensors = dict[str, torch.Tensor]
DOWN = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
QKV = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")


def described(skipped: tuple[str, ...] = ()) -> dict[str, Any]:
    """The quantization_config of such a checkpoint, in groups of 64."""
    return {
        "quant_method": "kvcompile_w4a8",
        "format": 1,
        "group_size": 64,
        "group_sizes": {"128": 64, "192": 64},
        "method": "rtn",
        "modules_to_not_convert": list(skipped),
    }


def tensors(config: dict[str, Any], skipped: tuple[str, ...] = (), *, quantised: bool = True) -> Tensors:
    """What a checkpoint of two layers has by its configuration."""
    architecture = config.get("architectures", [""])[0]
    made = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    if not config.get("tie_word_embeddings"):
        made["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    for i in range(2):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}.{norm}.weight"] = torch.ones(HIDDEN)
        if architecture == "Qwen3ForCausalLM":
            made |= {f"{layer}.self_attn.{x}_norm.weight": torch.ones(HEAD) for x in "qk"}
        for name, shape in LINEARS.items():
            full, weight = f"{layer}.{name}", torch.randn(shape)
            if quantised and full not in skipped:
                made |= {f"{full}.{field}": t for field, t in quantize(weight, 64)._asdict().items()}
            else:
                made[f"{full}.weight"] = weight
            if architecture == "Qwen2ForCausalLM" and name in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
            ):
                made[f"{full}.bias"] = torch.ones(shape[0])
    return {name: tensor.bfloat16() if tensor.dim() and _is_plain(name) else tensor for name, tensor in made.items()}


def _is_plain(name: str) -> bool:
    return name.endswith((".weight", ".bias"))
