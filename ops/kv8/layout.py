"""Layout and quantisation constants of the int8 KV cache, and the checks of the tensors that describe a call.

    kv_cache int8 (num_blocks, 2, block_size, G, d + 4)          [:, 0] keys, [:, 1] values

    one head vector:   | d bytes: int8 data | 4 bytes: its fp32 scale |        x ~ data * scale

The same bytes as vLLM 0.23's `int8_per_token_head`. A block is one run of bytes that holds data and scales of keys and
values, so whoever copies, frees or offloads a block id moves all of it. Blocks may lie further apart than they are
long (padded pages, layers interleaved in one allocation); within a block everything is packed in the order above.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZE_MULTIPLE = 16
SCALE_BYTES = 4
QUANT_MAX = 127
# An all-zero vector needs a divisor. Far below any activation, and far above where fp32 loses bits to denormals.
SCALE_FLOOR = 1e-20
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Shape of the int8 cache tensor; one element is one byte."""
    return (num_blocks, 2, block_size, num_kv_heads, head_size + SCALE_BYTES)


def check_store(op: str, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Raise ValueError unless the four tensors fit each other; the message names the argument, given and allowed."""
    _check_heads(op, "key", key)
    _check_heads(op, "value", value)
    if value.shape != key.shape or value.dtype != key.dtype:
        fail(op, "value", _tensor(value), f"what key has: {_tensor(key)}")
    _check_cache(op, kv_cache, key, "key")
    if kv_cache.shape[3] != key.shape[1]:
        fail(op, "key", f"{key.shape[1]} heads", f"the {kv_cache.shape[3]} KV heads of kv_cache")
    _check_vector(op, "slot_mapping", slots, torch.int64, key)
    if slots.shape[0] > key.shape[0]:
        fail(op, "slot_mapping", f"{slots.shape[0]} slots", f"at most one per token of key: {key.shape[0]}")


def check_attention(
    op: str,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Raise ValueError unless the tensors fit each other; the message names the argument, given and allowed."""
    _check_query(op, query, kv_cache, block_table, output)
    check_batch(op, block_table, seq_lens, query_start_loc)


def _check_query(
    op: str, query: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, output: torch.Tensor
) -> None:
    _check_heads(op, "query", query)
    _check_cache(op, kv_cache, query, "query")
    if query.shape[1] % kv_cache.shape[3]:
        fail(op, "query", f"{query.shape[1]} heads", f"a multiple of the {kv_cache.shape[3]} KV heads of kv_cache")
    if block_table.device != query.device:
        fail(op, "block_table", block_table.device, f"the device of query: {query.device}")
    _check_heads(op, "output", output)
    if output.shape != query.shape or output.dtype != query.dtype or output.device != query.device:
        fail(op, "output", _tensor(output), f"what query has: {_tensor(query)}")


def check_decode(
    op: str,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """As `check_attention`, for one query token a row."""
    _check_query(op, query, kv_cache, block_table, output)
    check_rows(op, block_table, seq_lens)
    if query.shape[0] != seq_lens.shape[0]:
        fail(op, "query", f"{query.shape[0]} tokens", f"one for each of the {seq_lens.shape[0]} rows of block_table")


def check_dequantise(
    op: str,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Raise ValueError unless the tensors fit each other; the message names the argument, given and allowed."""
    for name, x in (("keys", keys), ("values", values)):
        _check_heads(op, name, x)
        if not x.is_contiguous():
            fail(op, name, f"strides {x.stride()}", "a contiguous tensor")
    if values.shape != keys.shape or values.dtype != keys.dtype or values.device != keys.device:
        fail(op, "values", _tensor(values), f"what keys has: {_tensor(keys)}")
    _check_cache(op, kv_cache, keys, "keys")
    if kv_cache.shape[3] != keys.shape[1]:
        fail(op, "keys", f"{keys.shape[1]} heads", f"the {kv_cache.shape[3]} KV heads of kv_cache")
    if block_table.device != keys.device:
        fail(op, "block_table", block_table.device, f"the device of keys: {keys.device}")
    check_rows(op, block_table, begins, "begins")
    _check_bounds(op, "starts", starts, block_table)


def check_rows(op: str, block_table: torch.Tensor, seq_lens: torch.Tensor, name: str = "seq_lens") -> None:
    """Raise ValueError unless there is a table, and one int32 a row of it in the tensor called `name`."""
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        fail(op, "block_table", _tensor(block_table), "int32 [requests, blocks]")
    if block_table.shape[1] and block_table.stride(1) != 1:
        fail(op, "block_table", f"strides {block_table.stride()}", "stride 1 in the last dimension")
    _check_vector(op, name, seq_lens, torch.int32, block_table)
    if seq_lens.shape[0] != block_table.shape[0]:
        fail(op, name, f"{seq_lens.shape[0]} requests", f"the {block_table.shape[0]} rows of block_table")


def check_batch(op: str, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
    """The part of `check_attention` about the tensors that describe the batch and are shared by all layers."""
    check_rows(op, block_table, seq_lens)
    _check_bounds(op, "query_start_loc", query_start_loc, block_table)


def _check_bounds(op: str, name: str, bounds: torch.Tensor, block_table: torch.Tensor) -> None:
    _check_vector(op, name, bounds, torch.int32, block_table)
    rows = block_table.shape[0]
    if bounds.shape[0] != rows + 1:
        fail(op, name, f"{bounds.shape[0]} entries", f"one more than requests: {rows + 1}")


def check_one_device(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError if the tensors lie on more than one device. Needs no sizes: usable while tracing."""
    (first, leader), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != leader.device:
            fail(op, name, tensor.device, f"the device of {first}: {leader.device}")


def check_block_size(op: str, block_size: int) -> None:
    """Raise ValueError unless `block_size` (tokens) is one that every implementation supports."""
    if block_size < BLOCK_SIZE_MULTIPLE or block_size % BLOCK_SIZE_MULTIPLE:
        fail(op, "block_size", block_size, f"a multiple of {BLOCK_SIZE_MULTIPLE}")


def check_plan_sizes(op: str, num_kv_heads: int, head_size: int) -> None:
    """Raise ValueError unless a cache can have these sizes."""
    if num_kv_heads < 1:
        fail(op, "num_kv_heads", num_kv_heads, "1 or more")
    if head_size not in HEAD_SIZES:
        fail(op, "head_size", head_size, ", ".join(map(str, HEAD_SIZES)))


def check_scale(op: str, scale: float) -> None:
    """Raise ValueError unless `scale` keeps the order of scores: a negative one turns the causal mask around."""
    if not 0 < scale < math.inf:
        fail(op, "scale", scale, "a finite number above 0")


def _check_heads(op: str, name: str, x: torch.Tensor) -> None:
    if x.dim() != 3:
        fail(op, name, f"{x.dim()} dimensions", "3: [tokens, heads, head size]")
    if x.dtype not in FLOAT_DTYPES:
        fail(op, name, x.dtype, ", ".join(map(str, FLOAT_DTYPES)))
    if x.shape[1] < 1:
        fail(op, name, "0 heads", "1 or more")
    if x.shape[2] not in HEAD_SIZES:
        fail(op, name, f"head size {x.shape[2]}", ", ".join(map(str, HEAD_SIZES)))
    if x.stride(2) != 1:
        fail(op, name, f"strides {x.stride()}", "stride 1 in the last dimension")


def _check_cache(op: str, cache: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    if cache.dtype != torch.int8:
        fail(op, "kv_cache", cache.dtype, "torch.int8")
    if cache.dim() != 5 or cache.shape[1] != 2:
        fail(op, "kv_cache", f"shape {tuple(cache.shape)}", "(num_blocks, 2, block_size, KV heads, head size + 4)")
    if cache.device != like.device:
        fail(op, "kv_cache", cache.device, f"the device of {like_name}: {like.device}")
    blocks, _, block_size, heads, width = cache.shape
    if blocks < 1 or heads < 1:
        fail(op, "kv_cache", f"{blocks} blocks of {heads} heads", "1 or more of each")
    check_block_size(op, block_size)
    if width != like.shape[2] + SCALE_BYTES:
        allowed = f"{like.shape[2] + SCALE_BYTES}: the head size of {like_name} and {SCALE_BYTES} bytes of scale"
        fail(op, "kv_cache", f"{width} bytes per head vector", allowed)
    check_packed(op, "kv_cache", cache)


def check_packed(op: str, name: str, cache: torch.Tensor) -> None:
    """Raise ValueError unless a cache of five dimensions lies in memory as `kv_cache_shape` says, block by block."""
    blocks, _, block_size, heads, width = cache.shape
    half = block_size * heads * width
    pitch, *inner = cache.stride()
    if inner != [half, heads * width, width, 1]:
        allowed = f"(any, {half}, {heads * width}, {width}, 1): blocks packed as (2, block_size, heads, bytes)"
        fail(op, name, f"strides {cache.stride()}", allowed)
    if blocks > 1 and (pitch < 2 * half or pitch % SCALE_BYTES):
        fail(op, name, f"a block stride of {pitch}", f"a multiple of {SCALE_BYTES} of at least {2 * half}")
    if cache.storage_offset() % SCALE_BYTES:
        fail(op, name, f"storage offset {cache.storage_offset()}", f"a multiple of {SCALE_BYTES}")


def _check_vector(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, like: torch.Tensor) -> None:
    if x.dim() != 1 or x.dtype != dtype:
        fail(op, name, _tensor(x), f"{dtype} of one dimension")
    if x.device != like.device:
        fail(op, name, x.device, f"the device of the other tensors: {like.device}")


def _tensor(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def fail(op: str, argument: str, given: Any, allowed: Any) -> NoReturn:
    raise ValueError(f"kvcompile::{op}: {argument}: given {given}, allowed {allowed}")
