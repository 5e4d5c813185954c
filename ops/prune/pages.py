"""One request's positions in the int8 cache: reading spans of them, and making pages of tensors in no cache."""

from __future__ import annotations

import torch

from kvcompile.ops.kv8 import kv8_store, kv_cache_shape
from kvcompile.ops.kv8.layout import SCALE_BYTES

KEYS, VALUES = 0, 1


def read(kv_cache: torch.Tensor, block_table_row: torch.Tensor, half: int, begin: int, end: int) -> torch.Tensor:
    """fp32 [G, end - begin, d]: keys or values (`half`) of positions [begin, end), dequantised; no other slot."""
    raw = read_raw(kv_cache, block_table_row, half, begin, end)
    return raw[..., :-SCALE_BYTES].float().mul_(raw.view(torch.float32)[..., -1:]).transpose(0, 1)


def read_raw(kv_cache: torch.Tensor, block_table_row: torch.Tensor, half: int, begin: int, end: int) -> torch.Tensor:
    """int8 [end - begin, G, d + 4]: the same as they are stored, scales included."""
    block_size = kv_cache.shape[2]
    column = begin // block_size
    raw = kv_cache[:, half].index_select(0, block_table_row[column : -(-end // block_size)]).flatten(0, 1)
    return raw[begin - column * block_size : end - column * block_size]


def pages_of(key: torch.Tensor, value: torch.Tensor, block_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of one request, int8 (blocks, 2, block_size, G, d + 4), and its block table row, int32 [blocks].

    key, value: [T, G, d] bf16, fp16 or fp32, quantised as `kv8_store` does: scores computed from keys and values in
    flight are those computed from the cache that they would have been stored in. Slots past T are zeros.
    """
    length, kv_heads, head_size = key.shape
    blocks = max(1, -(-length // block_size))
    cache = key.new_zeros(kv_cache_shape(blocks, block_size, kv_heads, head_size), dtype=torch.int8)
    kv8_store(key, value, cache, torch.arange(length, device=key.device))
    return cache, torch.arange(blocks, dtype=torch.int32, device=key.device)
