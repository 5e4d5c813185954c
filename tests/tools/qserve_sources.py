"""A small checkpoint as OmniServe's converter leaves it, for the tests of `kvcompile import-qserve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.tools.qserve_layout import grouped

HIDDEN, INTERMEDIATE, HEAD = 128, 256, 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "float16",
}
LINEARS = {
    "self_attn.q_proj": (4 * HEAD, HIDDEN),
    "self_attn.k_proj": (2 * HEAD, HIDDEN),
    "self_attn.v_proj": (2 * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
MERGED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}

Tensors = dict[str, torch.Tensor]


def published() -> Tensors:
    """A two-layer Llama as OmniServe's converter leaves it: Hugging Face's names, q, k and v apart."""
    tensors = {"model.embed_tokens.weight": torch.randn(64, HIDDEN).half(), "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = torch.randn(64, HIDDEN).half()
    for i in range(2):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.rand(HIDDEN).half()
        tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(HEAD // 2)
        tensors[f"{layer}.self_attn.kv_scale_quant_orig"] = torch.rand(2)
        for seed, (name, shape) in enumerate(LINEARS.items()):
            for part, tensor in grouped(*shape, seed=100 * i + seed)[0].items():
                tensors[f"{layer}.{name}.{part}"] = tensor
    return tensors


def write(path: Path, tensors: Tensors, file: str = "pytorch_model.bin", **changes: Any) -> Path:
    """Make `path` a checkpoint folder of `tensors`, with `changes` of config.json."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (path / "tokenizer.json").write_text("{}")
    (save_file if file.endswith(".safetensors") else torch.save)(tensors, path / file)
    return path


def without(tensors: Tensors, *linears: str) -> Tensors:
    """`tensors` less all those of some modules, such as "model.layers.0.mlp.up_proj"."""
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in linears}


def merged(tensors: Tensors) -> Tensors:
    """The same model with q, k and v in one linear, and gate and up in one."""
    result = dict(tensors)
    for i in range(2):
        for name, parts in MERGED.items():
            full = f"model.layers.{i}.{name}"
            linears = [f"{full.rpartition('.')[0]}.{part}_proj" for part in parts]
            given = [of_linear(tensors, linear) for linear in linears]
            result = without(result, *linears)
            for tensor in given[0]:  # rows of qweight and s1 follow each other, and so do columns of s2
                result[f"{full}.{tensor}"] = torch.cat([g[tensor] for g in given], dim=int(tensor.startswith("s2")))
    return result


def of_linear(tensors: Tensors, name: str) -> Tensors:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
