"""What every system of `kvcompile bench attention` attends to: rows of tokens in pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

BLOCK_SIZE = 16  # of a cache, vLLM's default on a GPU
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """R rows of `context` tokens in the cache and `new` ones more, H query heads, G KV heads of size d.

    key, value: bf16 [pages, BLOCK_SIZE, G, d], all tokens of all rows; page 0 is no row's.
    query [R * new, H, d] and new_key, new_value [R * new, G, d]: the new tokens', which the pages hold too.
    released: pages that a pruned request has given up in front of those, for a system that knows of such.
    """

    context: int
    new: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    released: int = 0

    @property
    def rows(self) -> int:
        return self.block_table.shape[0]

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        return self._whole(self.rows, self.context + self.new)

    @cached_property
    def pruned_table(self) -> torch.Tensor:
        """`block_table` behind the released pages, which are the null block."""
        return torch.nn.functional.pad(self.block_table, (self.released, 0))

    @cached_property
    def pruned_lens(self) -> torch.Tensor:
        """`seq_lens` with the released tokens."""
        return self.seq_lens + self.released * BLOCK_SIZE

    @cached_property
    def starts(self) -> torch.Tensor:
        return torch.arange(self.rows + 1, dtype=torch.int32, device=self.query.device) * self.new

    @cached_property
    def output(self) -> torch.Tensor:
        return torch.empty_like(self.query)

    def _whole(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.query.device)


def make_batch(
    rows: int,
    context: int,
    new: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    device: torch.device,
    released: int = 0,
) -> Batch:
    """Normal values, pages in random order. The same ones for any `released`."""
    generator = torch.Generator(device).manual_seed(context + new)
    per_row = -(-(context + new) // BLOCK_SIZE)
    pages = rows * per_row + 1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=DTYPE)

    key, value = (draw(pages, BLOCK_SIZE, kv_heads, head_size) for _ in range(2))
    # Page 0 would be the null block, whose place in front of a row is not attended to.
    order = torch.randperm(pages - 1, generator=generator, device=device).int() + 1
    table = order.view(rows, per_row)
    positions = torch.arange(context, context + new, device=device)
    slots = (table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
    taken = (x.flatten(0, 1)[slots].clone() for x in (key, value))
    return Batch(context, new, draw(rows * new, heads, head_size), key, value, *taken, table, slots, released)
