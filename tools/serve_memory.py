"""What `kvcompile bench serve` gives a system of a GPU's memory: its weights, and of the rest of a total its KV cache.

The size of the cache is given to vLLM before it loads a weight, so weights are counted from config.json and the engine
is held to the count once it has loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcompile.config import UsageError
from kvcompile.llama import Expected, expected
from kvcompile.ops.w4a8 import legal_group
from kvcompile.ops.w4a8.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, tiles_along
from kvcompile.tools.bench_w4a8_systems import GROUP_SIZE
from kvcompile.tools.serve_gpus import Gpu
from kvcompile.tools.serve_systems import BLOCK_SIZE, SYSTEMS

GIB = 2**30
BESIDE_GIB = 4.0  # of an engine on top of weights and KV: CUDA context, activations of a step, graphs, workspaces
TOLERANCE = 0.02

_BF16 = 2
_VOCABULARY_STEP = 64  # rows to which vLLM pads embeddings and head
_MARLIN_STEP = 128  # channels of which its int8 kernel takes multiples
_ITEM_BYTES = {"auto": _BF16, "fp8": 1, "int8_per_token_head": 1}
_SCALE_BYTES = {"int8_per_token_head": 4}  # of each token and KV head, for keys and values each


def weight_bytes(config: Mapping[str, Any], weights: str, int8_head: bool = True) -> int:
    """Bytes of a model's parameters and buffers. config: its config.json; weights: "bf16", "fp8" or "w4a8".

    Norms and embeddings stay bf16 in all, as does the one table of rotary sines and cosines; so does the head, but for
    "w4a8" with `int8_head`, where one of its own (not the embedding) is int8.
    """
    count = {"bf16": _bf16, "fp8": _fp8, "w4a8": _w4a8}[weights]

    def held(tensor: Expected) -> int:
        if tensor.linear:
            return count(*tensor.shape)
        int8 = int8_head and weights == "w4a8" and tensor.name == "lm_head.weight"
        return _int8_head(*tensor.shape) if int8 else _plain(tensor)

    tensors = sum(map(held, expected(config, "config.json")))
    rotary = int(config.get("max_position_embeddings", 8192)) * _head_size(config) * _BF16
    return tensors + rotary


def block_bytes(config: Mapping[str, Any], cache: str) -> int:
    """Bytes of a KV block in all layers."""
    per_head = _head_size(config) * _ITEM_BYTES[cache] + _SCALE_BYTES.get(cache, 0)
    return 2 * config["num_hidden_layers"] * _kv_heads(config) * BLOCK_SIZE * per_head


def kv_bytes(
    name: str,
    config: Mapping[str, Any],
    total_gib: float | None,
    kv_gib: float | None,
    tokens: int,
    int8_head: bool = True,
) -> int:
    """KV cache of a system: `kv_gib`, or what its weights leave of `total_gib`.

    Raises UsageError if it does not hold one request of `tokens` tokens.
    """
    system = SYSTEMS[name]
    weights, block = weight_bytes(config, system.weights, int8_head), block_bytes(config, system.cache)
    given = int(kv_gib * GIB) if kv_gib is not None else int(total_gib * GIB) - weights
    need = (-(-tokens // BLOCK_SIZE) + 1) * block  # one block stands for "none"
    if given < need:
        flag = f"--kv-gib {kv_gib:g}" if kv_gib is not None else f"--total-gib {total_gib:g}"
        left = "" if kv_gib is not None else f" less {weights / GIB:.1f} GiB of weights"
        raise UsageError(
            f"{flag}: {name} needs {need / GIB:.2f} GiB of KV for one request of {tokens} tokens, and has "
            f"{max(given, 0) / GIB:.2f}{left}; give more, or shorter requests"
        )
    return given


def check_fit(held: Mapping[str, int], together: bool, gpu: Gpu) -> None:
    """Raise UsageError unless the GPU holds these systems: all of them at once, or each alone.

    held: bytes of weights and KV of each.
    """
    each = [size / GIB + BESIDE_GIB for size in held.values()]
    need = sum(each) if together else max(each, default=0.0)
    if need * GIB > gpu.bytes:
        what, remedy = ("together", "fewer --systems, no --together, or ") if together else ("at most", "")
        raise UsageError(
            f"GPU {gpu.index} has {gpu.bytes / GIB:.1f} GiB, and {', '.join(held)} need {need:.1f} {what}, with "
            f"{BESIDE_GIB:g} of each beside weights and KV; give {remedy}a smaller --total-gib or --kv-gib"
        )


def check_loaded(
    name: str, config: Mapping[str, Any], facts: Mapping[str, Any], kv: int, int8_head: bool = True
) -> None:
    """Raise UsageError if an engine holds other weights or another cache than it was counted to."""
    system = SYSTEMS[name]
    counted = {
        "weights": (weight_bytes(config, system.weights, int8_head), facts["weight_bytes"]),
        "KV blocks": (kv // block_bytes(config, system.cache), facts["blocks"]),
    }
    for what, (before, found) in counted.items():
        if abs(found - before) > TOLERANCE * before:
            unit = " bytes" if what == "weights" else ""
            raise UsageError(
                f"{name}: the engine has {found:,}{unit} of {what} where {before:,} were counted, more than "
                f"{TOLERANCE:.0%} apart: systems would not be compared at equal memory"
            )


def _plain(tensor: Expected) -> int:
    rows, *rest = tensor.shape
    if rest:
        rows = -(-rows // _VOCABULARY_STEP) * _VOCABULARY_STEP
    return rows * math.prod(rest) * _BF16


def _int8_head(rows: int, columns: int) -> int:
    """A byte of each weight and a bf16 scale of each row; bf16 where vLLM's Marlin kernel has no such width."""
    rows = -(-rows // _VOCABULARY_STEP) * _VOCABULARY_STEP
    return rows * columns * _BF16 if columns % _MARLIN_STEP else rows * (columns + _BF16)


def _bf16(rows: int, columns: int) -> int:
    return rows * columns * _BF16


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + 4  # one scale


def _w4a8(rows: int, columns: int) -> int:
    """As `ops.w4a8.layout` packs it: tiles, a scale and a zero point of each group, a scale of each row."""
    high = tiles_along(rows, TILE_ROWS)
    groups = columns // legal_group(columns, GROUP_SIZE)
    return high * tiles_along(columns, TILE_COLUMNS) * TILE_BYTES + high * groups * 2 * TILE_ROWS + 4 * rows


def _kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
