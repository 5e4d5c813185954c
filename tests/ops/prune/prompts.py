"""Builders of prompts in an int8 cache: pages in random order, every byte that no position maps to poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.ops.kv8 import kv8_store
from kvcompile.ops.prune import Method, prune_score, reference
from tests.ops.kv8.batches import poisoned_cache

WINDOW = 8  # small, so that the reference's loops are short


@dataclass
class Prompt:
    """One layer of one request: its observation queries, and its keys and values in the cache."""

    query: torch.Tensor
    cache: torch.Tensor
    row: torch.Tensor
    length: int

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def output_weight(self) -> torch.Tensor:
        """fp32, of numbers that half precision has too."""
        width = self.query.shape[1] * self.query.shape[2]
        return torch.randn(24, width, generator=torch.Generator().manual_seed(width)).bfloat16().float()

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.keys_and_values(self.cache, self.row, self.length)

    def score(self, method: Method) -> torch.Tensor:
        return prune_score(self.query, self.cache, self.row, self.length, self.scale, method, self.output_weight)

    def expected(self, method: Method) -> torch.Tensor:
        keys, values = self.keys_and_values()
        return reference.score(self.query.double(), keys, values, self.scale, method, self.output_weight)


def store_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: int = 16) -> Prompt:
    """A prompt of the given tensors: [W, H, d] and [T, G, d]. Block 0 and the last blocks are not its own."""
    length, kv_heads, head_size = key.shape
    columns = -(-length // block_size)
    generator = torch.Generator().manual_seed(length)
    row = torch.full((columns + 2,), 10**6, dtype=torch.int32)  # garbage behind the row's end
    row[:columns] = torch.randperm(columns + 2, generator=generator)[:columns] + 1
    positions = torch.arange(length)
    cache = poisoned_cache(columns + 3, block_size, kv_heads, head_size)
    kv8_store(key, value, cache, row[positions // block_size].long() * block_size + positions % block_size)
    return Prompt(query, cache, row, length)


def make_prompt(
    length: int,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 64,
    window: int = WINDOW,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Prompt:
    """Vectors of different size, so that scales differ, and peaked attention as in a trained model."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int, n: int) -> torch.Tensor:
        spread = torch.rand(tokens, n, 1, generator=generator) * 2 + 0.1
        return (torch.randn(tokens, n, head_size, generator=generator) * spread).to(dtype)

    return store_prompt(draw(window, heads), draw(length, kv_heads), draw(length, kv_heads), block_size)


def draw_keep(length: int, kept: int, kv_heads: int, seed: int = 0) -> torch.Tensor:
    """int32 [G, kept]: for each head some of the positions, ascending."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length, generator=generator)[:kept].sort().values for _ in range(kv_heads)]
    return torch.stack(rows).int()
