"""Checks of the pruning operators' arguments: ValueErrors that name the argument, what was given, what is allowed.

Contents of tensors are checked on a CPU alone: on a GPU that would wait for the device.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import (
    FLOAT_DTYPES,
    HEAD_SIZES,
    SCALE_BYTES,
    check_block_size,
    check_packed,
    check_scale,
    fail,
)
from kvcompile.ops.prune.methods import METHODS, Method

MOST_STAGES = 3  # of a selection


def check_score(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: str,
    output_weight: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `prune_score` fit each other."""
    op = "prune_score"
    if method not in METHODS:
        fail(op, "method", repr(method), ", ".join(METHODS))
    if query.dim() != 3 or query.dtype not in FLOAT_DTYPES:
        fail(op, "query", _tensor(query), f"[window, heads, head size] of {', '.join(map(str, FLOAT_DTYPES))}")
    window, heads, head_size = query.shape
    if window < 1 or heads < 1:
        fail(op, "query", f"{window} tokens of {heads} heads", "1 or more of each")
    _check_cache(op, "kv_cache", kv_cache, query.device)
    kv_heads = kv_cache.shape[3]
    if kv_cache.shape[4] != head_size + SCALE_BYTES:
        fail(op, "query", f"head size {head_size}", f"that of kv_cache: {kv_cache.shape[4] - SCALE_BYTES}")
    if heads % kv_heads:
        fail(op, "query", f"{heads} heads", f"a multiple of the {kv_heads} KV heads of kv_cache")
    if length < window:
        fail(op, "length", f"{length} tokens", f"at least the {window} of query, the observation window")
    _check_row(op, block_table_row, length, kv_cache)
    check_scale(op, scale)
    if method != "critical":
        return
    if output_weight is None:
        fail(op, "output_weight", None, "the weight of the layer's output projection: critical weighs values by it")
    if output_weight.dim() != 2 or output_weight.dtype not in FLOAT_DTYPES:
        fail(op, "output_weight", _tensor(output_weight), f"[hidden, {heads * head_size}] of a floating-point dtype")
    if output_weight.shape[1] != heads * head_size:
        fail(op, "output_weight", f"{output_weight.shape[1]} columns", f"{heads * head_size}: heads times head size")
    if output_weight.device != query.device:
        fail(op, "output_weight", output_weight.device, f"the device of query: {query.device}")


def check_parameters(sink: int, kernel: int, epsilon: float, seed: int) -> None:
    """Raise ValueError unless the numbers are such that a method can have."""
    op = "prune_score"
    if sink < 0:
        fail(op, "sink", sink, "0 or more")
    if kernel < 1 or kernel % 2 == 0:
        fail(op, "kernel", kernel, "an odd number from 1")
    if not 0 <= epsilon < float("inf"):
        fail(op, "epsilon", epsilon, "a finite number from 0")
    if not 0 <= seed < 2**32:
        fail(op, "seed", seed, "0 to 4294967295")


def check_stages(scores: torch.Tensor, method: Method) -> None:
    """Raise ValueError unless there are scores for each of the method's stages."""
    stages = len(method.stages)
    if scores.dim() == 3 and scores.shape[0] != stages:
        fail("prune_select", "scores", f"{scores.shape[0]} stages", f"the {stages} of {method.NAME}")


def check_select(
    scores: torch.Tensor,
    keep: int,
    sink: int,
    window: int,
    shares: list[float],
    chunks: list[int],
    reduces: list[str],
) -> None:
    """Raise ValueError unless `keep` tokens can be selected by `scores`."""
    op = "prune_select"
    if scores.dim() != 3 or scores.dtype != torch.float32:
        fail(op, "scores", _tensor(scores), "torch.float32 [stages, KV heads, tokens]")
    if not 1 <= scores.shape[0] <= MOST_STAGES:
        fail(op, "scores", f"{scores.shape[0]} stages", f"1 to {MOST_STAGES}")
    for name, values in (("shares", shares), ("chunks", chunks), ("reduces", reduces)):
        if len(values) != scores.shape[0]:
            fail(op, name, f"{len(values)}", f"one for each of the {scores.shape[0]} stages of scores")
    if not all(0 <= share <= 1 for share in shares) or sum(shares[:-1]) > 1 + 1e-9:
        fail(op, "shares", shares, "numbers from 0 to 1, and no more than 1 together but for the last")
    if min(chunks) < 1:
        fail(op, "chunks", chunks, "numbers from 1")
    if not {"sum", "max"}.issuperset(reduces):
        fail(op, "reduces", reduces, "sum, max")
    if sink < 0 or window < 0:
        fail(op, "sink", f"{sink} and a window of {window}", "0 or more of each")
    length, least = scores.shape[2], sink + window
    kept = f"{least}: sink {sink} and window {window}"
    if length < least:
        fail(op, "scores", f"{length} tokens", f"at least {kept}")
    if keep < least:
        fail(op, "keep", f"{keep} tokens", f"at least {kept}")
    if keep > length:
        fail(op, "keep", f"{keep} tokens", f"at most the {length} there are")


def check_compact(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    """Raise ValueError unless the arguments of `prune_compact` fit each other, before anything is written."""
    op = "prune_compact"
    if not kv_caches or len(keeps) != len(kv_caches):
        fail(op, "keeps", f"{len(keeps)} for {len(kv_caches)} caches", "one for each cache, and 1 or more")
    for layer, (kv_cache, keep) in enumerate(zip(kv_caches, keeps, strict=True)):
        _check_cache(op, f"kv_caches[{layer}]", kv_cache, block_table_row.device)
        block_size, kv_heads = kv_cache.shape[2:4]
        if block_size != kv_caches[0].shape[2]:
            allowed = f"that of the first cache: {kv_caches[0].shape[2]}"
            fail(op, f"kv_caches[{layer}]", f"a block size of {block_size}", allowed)
        if first < 0 or first % block_size:
            fail(op, "first", first, f"a multiple of the block size {block_size}, from 0")
        if first >= length:
            fail(op, "first", first, f"less than length, {length}")
        _check_row(op, block_table_row, length, kv_cache)
        name = f"keeps[{layer}]"
        _check_keep_kind(op, name, keep)
        if keep.device != kv_cache.device:
            fail(op, name, keep.device, f"the device of the caches: {kv_cache.device}")
        if tuple(keep.shape) != (kv_heads, length - first):
            allowed = f"({kv_heads}, {length - first}): KV heads, length - first"
            fail(op, name, f"shape {tuple(keep.shape)}", allowed)


def check_copy(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    """Raise ValueError unless the arguments of `prune_copy` fit each other, before anything is written."""
    op = "prune_copy"
    _check_cache(op, "source_cache", source_cache, keep.device)
    _check_cache(op, "kv_cache", kv_cache, keep.device)
    if source_cache.data_ptr() == kv_cache.data_ptr():
        fail(op, "source_cache", "kv_cache itself", "another tensor; prune_compact moves tokens within one")
    kv_heads, width = source_cache.shape[3:]
    if (kv_heads, width) != tuple(kv_cache.shape[3:]):
        given = f"{kv_cache.shape[3]} heads of {kv_cache.shape[4] - SCALE_BYTES}"
        fail(op, "kv_cache", given, f"those of source_cache: {kv_heads} of {width - SCALE_BYTES}")
    _check_keep_kind(op, "keep", keep)
    if keep.shape[0] != kv_heads or keep.shape[1] < 1:
        fail(op, "keep", f"shape {tuple(keep.shape)}", f"({kv_heads}, 1 or more): KV heads, kept tokens")
    if first < 0:
        fail(op, "first", first, "0 or more")
    _check_row(op, source_row, keep.shape[1], source_cache, "source_row", "keep")
    _check_row(op, block_table_row, first + keep.shape[1], kv_cache, given="first + kept")


def check_blocks(
    op: str,
    row: torch.Tensor,
    length: int,
    kv_cache: torch.Tensor,
    begin: int = 0,
    name: str = "block_table_row",
) -> None:
    """Raise ValueError unless the columns of positions [begin, length) hold different blocks. Reads the row."""
    block_size = kv_cache.shape[2]
    held = row[begin // block_size : -(-length // block_size)].sort().values
    if int(held[0]) < 0 or int(held[-1]) >= kv_cache.shape[0]:
        outside = int(held[0]) if int(held[0]) < 0 else int(held[-1])
        fail(op, name, f"block {outside}", f"0 to {kv_cache.shape[0] - 1}")
    repeated = held[1:][held.diff() == 0]
    if repeated.numel():
        allowed = "each block once: a row without its released columns"
        fail(op, name, f"block {int(repeated[0])} twice", allowed)


def check_keep(op: str, name: str, keep: torch.Tensor, length: int) -> None:
    """Raise ValueError unless each row of `keep` ascends strictly within [0, length). Reads it."""
    if int(keep[:, 0].min()) < 0 or int(keep[:, -1].max()) >= length or bool((keep.diff(dim=1) <= 0).any()):
        lowest, highest = (int(x) for x in torch.aminmax(keep))
        given = f"positions from {lowest} to {highest}"
        fail(op, name, given, f"positions that ascend, each once, from 0 to {length - 1}")


def _check_cache(op: str, name: str, cache: torch.Tensor, device: torch.device) -> None:
    """As the kv8 operators ask of a cache (`kv8/layout.py`), for one called `name` on `device`."""
    if cache.dtype != torch.int8 or cache.dim() != 5 or cache.shape[1] != 2:
        allowed = "torch.int8 (num_blocks, 2, block_size, KV heads, head size + 4)"
        fail(op, name, _tensor(cache), allowed)
    if cache.device != device:
        fail(op, name, cache.device, f"the device of the other tensors: {device}")
    blocks, _, block_size, kv_heads, width = cache.shape
    if blocks < 1 or kv_heads < 1:
        fail(op, name, f"{blocks} blocks of {kv_heads} heads", "1 or more of each")
    check_block_size(op, block_size)
    if width - SCALE_BYTES not in HEAD_SIZES:
        fail(op, name, f"head size {width - SCALE_BYTES}", ", ".join(map(str, HEAD_SIZES)))
    check_packed(op, name, cache)


def _check_row(
    op: str,
    row: torch.Tensor,
    length: int,
    kv_cache: torch.Tensor,
    name: str = "block_table_row",
    given: str = "length",
) -> None:
    """A block table row called `name` with room for `length` tokens, which are those of the argument `given`."""
    if row.dim() != 1 or row.dtype != torch.int32:
        fail(op, name, _tensor(row), "torch.int32 of one dimension")
    if row.device != kv_cache.device:
        fail(op, name, row.device, f"the device of the cache: {kv_cache.device}")
    if length > row.shape[0] * kv_cache.shape[2]:
        room = f"at most the {row.shape[0] * kv_cache.shape[2]} that {name} has room for"
        fail(op, given, f"{length} tokens", room)


def _tensor(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def _check_keep_kind(op: str, name: str, keep: torch.Tensor) -> None:
    if keep.dim() != 2 or keep.dtype != torch.int32:
        fail(op, name, _tensor(keep), "torch.int32 [KV heads, kept tokens]")
