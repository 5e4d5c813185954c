"""`prune_compact` and `prune_copy` on a CPU, whose checks the arguments have passed."""

from __future__ import annotations

import torch


def compact(kv_cache: torch.Tensor, block_table_row: torch.Tensor, keep: torch.Tensor, first: int) -> None:
    """One layer of `op_move.prune_compact`."""
    if first == 0:  # every token is kept, and lies where it belongs
        return
    copy(kv_cache, block_table_row, kv_cache, block_table_row, keep, first)


def copy(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    """As `op_move.prune_copy`. The two caches may be one: all kept vectors are gathered before the first is written."""
    head = torch.arange(keep.shape[0])[:, None]
    source = keep.long()
    target = torch.arange(first, first + keep.shape[1])[None]
    blocks, slots = _place(source_row, source, source_cache)
    moved = _words(source_cache)[blocks, :, slots, head]
    blocks, slots = _place(block_table_row, target, kv_cache)
    _words(kv_cache)[blocks, :, slots, head] = moved


def _place(row: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[2]
    return row[position // block_size].long(), position % block_size


def _words(cache: torch.Tensor) -> torch.Tensor:
    """A quarter of the elements to move; bits, never numbers."""
    return cache.view(torch.int32)
