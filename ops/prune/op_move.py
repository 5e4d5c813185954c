"""The operators `kvcompile::prune_compact` and `kvcompile::prune_copy`: schemas, fakes, checks, their Python names.

T = length tokens of one request, of which each of G KV heads keeps K; `kv8/layout.py` has the cache. Keys, values and
scales move as bytes, d + 4 a vector. On CUDA nothing waits for the device: contents of tensors are not checked.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import check_one_device
from kvcompile.ops.library import register
from kvcompile.ops.prune import checks, cpu_move, cuda_move


def prune_compact(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    """Move the kept tokens of one request to its last positions: keep[g, j] of head g to position first + j.

    kv_caches: int8 (num_blocks, 2, block_size, G, d + 4) of each layer, written in place; one block size.
    block_table_row: int32 [columns], the request's blocks in every layer.
    keeps: int32 [G, K] of each layer, each row ascending, as `select` returns them.
    length: T. first: T - K, a multiple of the block size. Positions [first, T) are all rewritten; those before are left
        as they are, for their blocks to be released; no other slot is touched. first = 0 (K = T) changes no byte.

    Everything is checked before the first byte is written.

    Raises ValueError naming the argument that does not fit.
    """
    torch.ops.kvcompile.prune_compact(kv_caches, block_table_row, keeps, length, first)


def prune_copy(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    """Copy the kept tokens of one request and layer into a cache that never held it: keep[g, j] to position first + j.

    source_cache, source_row: int8 (num_blocks, 2, any block size, G, d + 4) and int32 [columns]: where the prompt is,
        for example as `pages_of` returns it.
    kv_cache, block_table_row: int8 (num_blocks, 2, block_size, G, d + 4), another tensor, and int32 [columns]: where
        the kept tokens go. Columns in front of position `first` are not read: they may be of the null block.
    keep: int32 [G, K], K >= 1, each row ascending, as `select` returns it. first: position of the first one, from 0.

    Positions [first, first + K) are all written, no other slot is touched.

    Raises ValueError naming the argument that does not fit.
    """
    torch.ops.kvcompile.prune_copy(source_cache, source_row, kv_cache, block_table_row, keep, first)


def _compact_cpu(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    checks.check_compact(kv_caches, block_table_row, keeps, length, first)
    for layer, (kv_cache, keep) in enumerate(zip(kv_caches, keeps, strict=True)):
        checks.check_blocks("prune_compact", block_table_row, length, kv_cache)
        checks.check_keep("prune_compact", f"keeps[{layer}]", keep, length)
    for kv_cache, keep in zip(kv_caches, keeps, strict=True):
        cpu_move.compact(kv_cache, block_table_row, keep, first)


def _compact_cuda(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    checks.check_compact(kv_caches, block_table_row, keeps, length, first)
    cuda_move.compact(kv_caches, block_table_row, keeps, length, first)


def _compact_fake(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    for layer, (kv_cache, keep) in enumerate(zip(kv_caches, keeps, strict=True)):
        named = {f"kv_caches[{layer}]": kv_cache, f"keeps[{layer}]": keep}
        check_one_device("prune_compact", block_table_row=block_table_row, **named)


def _copy_cpu(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    checks.check_copy(source_cache, source_row, kv_cache, block_table_row, keep, first)
    checks.check_keep("prune_copy", "keep", keep, source_row.shape[0] * source_cache.shape[2])
    checks.check_blocks("prune_copy", source_row, int(keep.max()) + 1, source_cache, name="source_row")
    checks.check_blocks("prune_copy", block_table_row, first + keep.shape[1], kv_cache, first)
    cpu_move.copy(source_cache, source_row, kv_cache, block_table_row, keep, first)


def _copy_cuda(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    checks.check_copy(source_cache, source_row, kv_cache, block_table_row, keep, first)
    cuda_move.copy(source_cache, source_row, kv_cache, block_table_row, keep, first)


def _copy_fake(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    tensors = {"source_cache": source_cache, "source_row": source_row, "kv_cache": kv_cache}
    check_one_device("prune_copy", **tensors, block_table_row=block_table_row, keep=keep)


register(
    "prune_compact(Tensor(a!)[] kv_caches, Tensor block_table_row, Tensor[] keeps, SymInt length, SymInt first) -> ()",
    fake=_compact_fake,
    CPU=_compact_cpu,
    CUDA=_compact_cuda,
)
register(
    "prune_copy(Tensor source_cache, Tensor source_row, Tensor(a!) kv_cache, Tensor block_table_row, Tensor keep, "
    "SymInt first) -> ()",
    fake=_copy_fake,
    CPU=_copy_cpu,
    CUDA=_copy_cuda,
)
