"""Builders of batches over an int8 cache whose every unwritten byte is poison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.ops.kv8 import kv8_attention, kv8_store, kv_cache_shape, plan_attention

POISON = -1  # all bits set: four of these bytes are an fp32 NaN


@dataclass
class Batch:
    """Rows of (context, new) tokens whose keys and values are in the cache."""

    query: torch.Tensor
    key: torch.Tensor  # [all tokens of all rows, G, d], row after row
    value: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.block_table, self.seq_lens, self.query_start_loc

    def attend(self, planned: bool = False) -> torch.Tensor:
        """The operator's output, from a buffer that was full of NaN."""
        output = torch.full_like(self.query, float("nan"))
        _, _, block_size, kv_heads, width = self.cache.shape
        plan = plan_attention(*self.tensors, block_size, kv_heads, width - 4) if planned else None
        kv8_attention(self.query, self.cache, *self.tensors, output, self.scale, plan)
        return output


def poisoned_cache(num_blocks: int, block_size: int, kv_heads: int, head_size: int) -> torch.Tensor:
    return torch.full(kv_cache_shape(num_blocks, block_size, kv_heads, head_size), POISON, dtype=torch.int8)


def make_batch(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """`rows`: (context tokens, new tokens) per request. Physical blocks in random order, garbage behind every table."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [context + new for context, new in rows]
    per_row = [-(-length // block_size) for length in lengths]
    columns = max(per_row, default=0) + 2
    num_blocks = sum(per_row) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.full((len(rows), columns), 10**6, dtype=torch.int32)
    slots: list[int] = []
    for row, count in enumerate(per_row):
        blocks, order = order[:count], order[count:]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(lengths[row])]

    def draw(tokens: int, n: int) -> torch.Tensor:
        # Rows of different size, so that scales differ, and peaked scores as in a trained model.
        spread = torch.rand(tokens, n, 1, generator=generator) * 2 + 0.1
        return (torch.randn(tokens, n, head_size, generator=generator) * spread).to(dtype)

    tokens = sum(new for _, new in rows)
    key, value = draw(sum(lengths), kv_heads), draw(sum(lengths), kv_heads)
    cache = poisoned_cache(num_blocks, block_size, kv_heads, head_size)
    kv8_store(key, value, cache, torch.tensor(slots, dtype=torch.int64))
    starts = [0]
    for _, new in rows:
        starts.append(starts[-1] + new)
    return Batch(
        query=draw(tokens, heads),
        key=key,
        value=value,
        cache=cache,
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )
