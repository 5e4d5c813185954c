"""`kv8_decode` and `kv8_dequantise` on a CPU: decode is attention (cpu.py) without the pages that were released."""

from __future__ import annotations

import torch

from kvcompile.ops.kv8 import cpu

TAIL = 256  # as in dequantise.cu


def plan(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    """The table without leading blocks 0, int32 [R, columns]; the lengths without their positions, int32 [R]."""
    rows, columns = block_table.shape
    pages = -(-seq_lens // block_size)
    leading = (block_table == 0).int().cumprod(1).sum(1, dtype=torch.int32)
    released = torch.minimum(leading, pages)
    lengths = (seq_lens - released * block_size).clamp(min=0)
    shifted = torch.arange(columns)[None, :] + released[:, None]
    table = block_table.gather(1, shifted.clamp(max=max(columns - 1, 0)).long()) if columns else block_table
    return [table, lengths]


def decode(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, scale: float, plan: list[torch.Tensor]
) -> None:
    """As `op_decode.kv8_decode`, whose checks the arguments have passed."""
    table, lengths = plan
    output.zero_()
    held = lengths.nonzero().flatten()
    if not held.numel():
        return
    table, lengths = table[held], lengths[held]
    starts = torch.arange(held.numel() + 1, dtype=torch.int32)
    _, _, block_size, kv_heads, _ = kv_cache.shape
    steps = cpu.plan(table, lengths, starts, block_size, kv_heads, query.shape[2])
    attended = torch.empty_like(query[held])
    cpu.attention(query[held], kv_cache, table, attended, scale, steps)
    output[held] = attended


def dequantise(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """As `op_decode.kv8_dequantise`, whose checks the arguments have passed."""
    block_size, head_size = kv_cache.shape[2], keys.shape[2]
    for row, begin in enumerate(begins.tolist()):
        start, end = starts[row : row + 2].tolist()
        positions = torch.arange(begin, begin + end - start)
        blocks = block_table[row, positions // block_size].long()
        vectors = kv_cache[blocks, :, positions % block_size]  # [tokens, 2, G, d + 4]
        scales = vectors[..., head_size:].contiguous().view(torch.float32)
        finite = scales.isfinite().all(1)
        key_scales, value_scales = scales.unbind(1)
        keys[start:end] = vectors[:, 0, :, :head_size] * torch.where(finite, key_scales, torch.nan)
        values[start:end] = vectors[:, 1, :, :head_size] * torch.where(finite, value_scales, 0.0)
    tokens = int(starts[-1])
    values[tokens : tokens + TAIL] = 0
