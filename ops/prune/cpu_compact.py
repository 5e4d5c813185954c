"""`prune_compact` on a CPU."""

from __future__ import annotations

import torch


def compact(kv_cache: torch.Tensor, block_table_row: torch.Tensor, keep: torch.Tensor, first: int) -> None:
    """One layer of `op.prune_compact`, whose checks the arguments have passed.

    Sources and destinations overlap, so all kept vectors are gathered before the first is written.
    """
    if first == 0:  # every token is kept, and lies where it belongs
        return
    block_size = kv_cache.shape[2]
    vectors = kv_cache.view(torch.int32)  # a quarter of the elements to move; bits, never numbers
    head = torch.arange(keep.shape[0])[:, None]
    source = keep.long()
    target = torch.arange(first, first + keep.shape[1])
    moved = vectors[block_table_row[source // block_size].long(), :, source % block_size, head]
    vectors[block_table_row[target // block_size].long()[None], :, (target % block_size)[None], head] = moved
