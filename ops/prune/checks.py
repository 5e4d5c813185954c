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


def check_select(scores: torch.Tensor, method: Method, keep: int) -> None:
    """Raise ValueError unless `keep` tokens can be selected by `scores`."""
    op = "prune_select"
    stages = len(method.stages)
    if scores.dim() != 3 or scores.dtype != torch.float32:
        fail(op, "scores", _tensor(scores), "torch.float32 [stages, KV heads, tokens]")
    if scores.shape[0] != stages:
        fail(op, "scores", f"{scores.shape[0]} stages", f"the {stages} of {method.NAME}")
    length, least = scores.shape[2], method.always_kept
    kept = f"{least}: sink {method.sink} and window {method.window}"
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
        if keep.dim() != 2 or keep.dtype != torch.int32:
            fail(op, name, _tensor(keep), "torch.int32 [KV heads, kept tokens]")
        if keep.device != kv_cache.device:
            fail(op, name, keep.device, f"the device of the caches: {kv_cache.device}")
        if tuple(keep.shape) != (kv_heads, length - first):
            allowed = f"({kv_heads}, {length - first}): KV heads, length - first"
            fail(op, name, f"shape {tuple(keep.shape)}", allowed)


def check_blocks(op: str, block_table_row: torch.Tensor, length: int, kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless the row's columns up to `length` hold different blocks of the cache. Reads the row."""
    held = block_table_row[: -(-length // kv_cache.shape[2])].sort().values
    if int(held[0]) < 0 or int(held[-1]) >= kv_cache.shape[0]:
        outside = int(held[0]) if int(held[0]) < 0 else int(held[-1])
        fail(op, "block_table_row", f"block {outside}", f"0 to {kv_cache.shape[0] - 1}")
    repeated = held[1:][held.diff() == 0]
    if repeated.numel():
        allowed = "each block once: a row without its released columns"
        fail(op, "block_table_row", f"block {int(repeated[0])} twice", allowed)


def check_keep(keep: torch.Tensor, layer: int, length: int) -> None:
    """Raise ValueError unless each row of `keep` ascends strictly within [0, length). Reads it."""
    if int(keep[:, 0].min()) < 0 or int(keep[:, -1].max()) >= length or bool((keep.diff(dim=1) <= 0).any()):
        lowest, highest = (int(x) for x in torch.aminmax(keep))
        given = f"positions from {lowest} to {highest}"
        fail("prune_compact", f"keeps[{layer}]", given, f"positions that ascend, each once, from 0 to {length - 1}")


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


def _check_row(op: str, row: torch.Tensor, length: int, kv_cache: torch.Tensor) -> None:
    if row.dim() != 1 or row.dtype != torch.int32:
        fail(op, "block_table_row", _tensor(row), "torch.int32 of one dimension")
    if row.device != kv_cache.device:
        fail(op, "block_table_row", row.device, f"the device of the cache: {kv_cache.device}")
    if length > row.shape[0] * kv_cache.shape[2]:
        room = f"at most the {row.shape[0] * kv_cache.shape[2]} that block_table_row has room for"
        fail(op, "length", f"{length} tokens", room)


def _tensor(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"
