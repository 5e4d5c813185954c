"""A small random Llama, its W4A8 checkpoint, and what it should answer, computed from the checkpoint's own tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvcompile.ops.w4a8 import legal_group, quantize

LAYERS, HEADS, KV_HEADS, HEAD = 2, 4, 2, 64
HIDDEN, INTERMEDIATE, VOCABULARY = 256, 320, 512
EPSILON, THETA = 1e-5, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
QKV_GATE_UP_O_DOWN = 4  # linears of a layer after vLLM has merged them


def write_plain(folder: Path, *, intermediate: int = INTERMEDIATE) -> Path:
    """An unquantised checkpoint in bf16, its head not tied. Two layers: one more gives no other graph than these."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, size: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).bfloat16()

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN, size=0.1)}
    tensors["model.norm.weight"] = 1 + random(HIDDEN, size=0.1)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = 1 + random(HIDDEN, size=0.1)
        for name, shape in LINEARS.items():
            rows, columns = (intermediate if n == INTERMEDIATE else n for n in shape)
            tensors[f"{layer}.{name}.weight"] = random(rows, columns, size=columns**-0.5)
    tensors["lm_head.weight"] = random(VOCABULARY, HIDDEN, size=0.1)
    return _write(folder, {**CONFIG, "intermediate_size": intermediate}, tensors)


def write_quantised(folder: Path, plain: Path) -> Path:
    """The W4A8 checkpoint of `plain`, rounded to nearest in groups of 128 or what is legal below."""
    tensors, sizes = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        width = tensor.shape[1]
        sizes[str(width)] = legal_group(width, 128)
        for part, value in quantize(tensor, sizes[str(width)])._asdict().items():
            tensors[f"{name.removesuffix('.weight')}.{part}"] = value
    described = {
        "quant_method": "kvcompile_w4a8",
        "format": 1,
        "group_size": 128,
        "group_sizes": sizes,
        "method": "rtn",
        "modules_to_not_convert": [],
    }
    config = json.loads((plain / "config.json").read_text())
    return _write(folder, {**config, "quantization_config": described}, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def int8_weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """(w4 - z) * s2 of one linear by the definition of the format, float64 [N, K]."""
    qweight, scales, zeros = (tensors[f"{name}.{part}"].long() for part in ("qweight", "group_scales", "group_zeros"))
    codes = torch.stack((qweight % 16, qweight // 16), dim=2).flatten(1)
    group = codes.shape[1] // scales.shape[1]
    scales, zeros = (grid.repeat_interleave(group, dim=1) for grid in (scales, zeros))
    return ((codes - zeros) * scales).double()


def product(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """What linear `name` makes of x, fp32 [T, K]: the sum of int8 products, exact in float64, scaled in fp32."""
    largest = x.abs().amax(-1, keepdim=True)
    x_q = (x * (127 / largest)).round().double()
    return (x_q @ int8_weight(tensors, name).t()).float() * (largest / 127) * tensors[f"{name}.channel_scales"]


def int8_head(weight: torch.Tensor) -> torch.Tensor:
    """What an engine in fp32 makes of the head [N, K] of a W4A8 model: int8 with one scale a row, float64."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales).round().double() * scales.double()


def logprobs(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """log p(tokens[i] | tokens before it) for i >= 1, float64, by a W4A8 checkpoint, or a plain one in float64.

    Shares no code with the product: weights are decoded by the format's definition, and everything but W4A8 linears
    and an int8 head runs in float64.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    quantised = any(name.endswith(".qweight") for name in tensors)
    head = int8_head(tensors["lm_head.weight"]) if quantised else tensors["lm_head.weight"].double()

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        if f"{name}.weight" in tensors:
            return x @ tensors[f"{name}.weight"].double().t()
        return product(tensors, name, x.float()).double()

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * tensors[f"{name}.weight"].double()

    angles = torch.arange(len(tokens)).double()[:, None] * THETA ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = tensors["model.embed_tokens.weight"].double()[tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        h = norm(f"{layer}.input_layernorm", x)
        q, k, v = (
            linear(f"{layer}.self_attn.{name}_proj", h).unflatten(1, (heads, HEAD))
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / HEAD**0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + linear(f"{layer}.self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        h = norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (linear(f"{layer}.mlp.{name}_proj", h) for name in ("gate", "up"))
        x = x + linear(f"{layer}.mlp.down_proj", gate / (1 + (-gate).exp()) * up)
    logits = norm("model.norm", x) @ head.t()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
