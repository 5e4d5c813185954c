"""The int8 KV cache in float64 and plain loops: slow, obviously right, the oracle of the tests.

quantise     s = max(max|x| / 127, 1e-20)        q = round_half_even(x / s)
dequantise   x' = q * s
attention    o_i = sum_t softmax_t(scale * q_i . k'_t) v'_t          over the positions t <= position of i
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import QUANT_MAX, SCALE_BYTES, SCALE_FLOOR


def quantise(x: torch.Tensor) -> torch.Tensor:
    """Head vectors [..., d] as the cache stores them: int8 [..., d + 4], data and the bytes of the fp32 scale.

    The scale is computed in fp32, as part of the definition: it is what gets stored. Data under a scale that is not
    finite is 0.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / QUANT_MAX).clamp_min(SCALE_FLOOR)
    data = torch.where(scale.isfinite(), torch.round(x / scale), 0.0).to(torch.int8)
    return torch.cat([data, scale.contiguous().view(torch.int8)], -1)


def dequantise(rows: torch.Tensor) -> torch.Tensor:
    """float64 [..., d] of stored head vectors int8 [..., d + 4]."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].double() * scale.double()


def store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`kvcompile::kv8_store`, token by token."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, 0, slot % block_size] = quantise(key[token])
            kv_cache[slot // block_size, 1, slot % block_size] = quantise(value[token])


def attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`kvcompile::kv8_attention` in float64, row by row and query by query: [T, H, d], zeros where nothing attends."""
    block_size, kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    group = query.shape[1] // kv_heads
    output = torch.zeros(query.shape, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        positions = torch.arange(length)
        blocks = block_table[row, positions // block_size].long()
        kv = dequantise(kv_cache[blocks, :, positions % block_size])  # [length, 2, G, d]
        keys, values = kv[:, 0].repeat_interleave(group, 1), kv[:, 1].repeat_interleave(group, 1)
        new = starts[row + 1] - starts[row]
        for i in range(new if length else 0):
            seen = length - new + i + 1
            scores = torch.einsum("hd,thd->ht", query[starts[row] + i].double(), keys[:seen]) * scale
            output[starts[row] + i] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen])
    return output
