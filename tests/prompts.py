"""Prompts over an int8 cache as vLLM describes them, and what attention to them is in float64."""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.ops.kv8 import reference
from tests.ops.kv8.batches import Batch

# (context, new): fresh and continued, some of equal length, a page and not a page.
MIXED = [(0, 17), (33, 5), (16, 16), (0, 16), (0, 32), (47, 130), (300, 7), (130, 2)]


def new_tokens(batch: Batch) -> list[torch.Tensor]:
    """Keys and values of the new tokens alone, [T, G, d]."""
    taken, end = [], 0
    new = batch.query_start_loc.diff().tolist()
    for length, count in zip(batch.seq_lens.tolist(), new, strict=True):
        end += length
        taken.append(torch.arange(end - count, end))
    return [x[torch.cat(taken)] for x in (batch.key, batch.value)]


def common(batch: Batch, device: str) -> Any:
    """vLLM's description of the batch on that device, with more slots than tokens, as for a padded batch."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = batch.query_start_loc
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens.to(device),
        num_reqs=batch.seq_lens.shape[0],
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table.to(device),
        slot_mapping=torch.full((int(starts[-1]) + 5,), -1, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=batch.seq_lens,
    )


def expected(batch: Batch, released: dict[int, int] | None = None) -> torch.Tensor:
    """float64 [T, H, d]: context as the cache has it, less `released` pages of a row, new tokens as they are."""
    block_size, group = batch.cache.shape[2], batch.query.shape[1] // batch.cache.shape[3]
    keys, values = new_tokens(batch)
    starts, outputs = batch.query_start_loc.tolist(), []
    for row, length in enumerate(batch.seq_lens.tolist()):
        new = slice(starts[row], starts[row + 1])
        count = starts[row + 1] - starts[row]
        positions = torch.arange(block_size * (released or {}).get(row, 0), length - count)
        blocks = batch.block_table[row, positions // block_size].long()
        held = reference.dequantise(batch.cache[blocks, :, positions % block_size])
        k = torch.cat([held[:, 0], keys[new].double()]).repeat_interleave(group, 1)
        v = torch.cat([held[:, 1], values[new].double()]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,thd->hqt", batch.query[new].double(), k) * batch.scale
        later = torch.arange(len(k))[None] > len(positions) + torch.arange(count)[:, None]
        scores.masked_fill_(later, float("-inf"))
        outputs.append(torch.einsum("hqt,thd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)
