"""The operators `kvcompile::kv8_store` and `kvcompile::kv8_attention`: schemas, fakes, checks and their Python names.

T tokens, R requests (rows), H query heads, G KV heads with H a multiple of G, d head size; `layout.py` has the cache.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8 import cpu, cuda, layout
from kvcompile.ops.library import register


def kv8_store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantise the keys and values of T tokens and write them, data and scales, into their cache slots.

    key, value: [T, G, d] bf16, fp16 or fp32; may be views into a fused qkv tensor (last dimension of stride 1).
    kv_cache: int8 (num_blocks, 2, block_size, G, d + 4), written in place.
    slot_mapping: int64 [T' <= T]; token t goes to offset `slot % block_size` of block `slot // block_size`. Negative:
        the token is skipped and no memory is touched (padding is -1). Tokens past T' are ignored. Slots differ from
        each other; block 0 is a block like any other, so a caller whose block 0 is the null block maps padding to -1.

    Per token and head, in fp32: scale = max(max|x| / 127, 1e-20), data = round-half-even(x / scale). Zeros stay zero. A
    vector that holds a NaN or an infinity gets a scale that is not finite and zero data: it reads as NaN, which reaches
    the outputs that attend to it and no other slot.

    On CUDA: bf16 or fp16, heads of 4 elements aligned, and slots are not checked.

    Raises ValueError naming the argument that does not fit, or a slot past the end of the cache.
    """
    torch.ops.kvcompile.kv8_store(key, value, kv_cache, slot_mapping)


def kv8_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
) -> None:
    """Causal attention of new tokens over the int8 cache, their own keys and values included, written to `output`.

    query, output: [T, H, d] of one dtype: bf16, fp16 or fp32; last dimension of stride 1.
    kv_cache: int8 (num_blocks, 2, block_size, G, d + 4); `kv8_store` has written the new tokens already.
    block_table: int32 [R, columns]; column c of a row holds positions [c * block_size, (c + 1) * block_size). Columns
        past the row's length are not read.
    seq_lens: int32 [R]: tokens in the cache, new ones included. A row of length 0 gives zeros.
    query_start_loc: int32 [R + 1], from 0, not decreasing. Row r owns query tokens query_start_loc[r] to [r + 1]; the
        i-th of its q_len sits at position seq_len - q_len + i and sees positions up to its own. Rows of one token
        (decode), whole prompts, and chunks over earlier context (chunked prefill, prefix-cache hits) mix freely. Output
        rows from query_start_loc[R] on (padding) are left as they are.
    scale: factor on the scores, above 0, usually d ** -0.5.
    plan: what `plan_attention` returned for these very block_table, seq_lens and query_start_loc, or None.

    A request whose leading blocks were released passes its table without them and its length less their tokens.
    Slots that no position maps to may hold anything, NaN scales included.

    Decode computes in fp32. Prefill runs torch's flash attention: for bf16 queries on K and V dequantised in fp32 and
    rounded to bf16, otherwise in fp32. Memory beyond inputs and output is bounded, whatever the lengths.

    On a CPU alone: on CUDA rows of one token go to `kv8_decode`, and prompts attend to their own keys and values before
    these are quantised (integrations/vllm/attention_prefill.py).

    Raises ValueError naming the argument that does not fit.
    """
    torch.ops.kvcompile.kv8_attention(query, kv_cache, block_table, seq_lens, query_start_loc, output, scale, plan)


def plan_attention(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
) -> list[torch.Tensor]:
    """The part of `kv8_attention` that is the same for every layer of a step, to be computed once and passed as `plan`.

    Optional: without it each call works it out again. Arguments as for `kv8_attention`; `block_size` in tokens. The
    result is opaque, holds what the three tensors contain at the time of the call, and is valid for that step alone.

    Raises ValueError if a row has more tokens than its table has room for, or more new tokens than tokens.
    """
    op = "plan_attention"
    layout.check_batch(op, block_table, seq_lens, query_start_loc)
    layout.check_block_size(op, block_size)
    layout.check_plan_sizes(op, num_kv_heads, head_size)
    return cpu.plan(block_table, seq_lens, query_start_loc, block_size, num_kv_heads, head_size)


def _store_cpu(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    layout.check_store("kv8_store", key, value, kv_cache, slot_mapping)
    cpu.store(key, value, kv_cache, slot_mapping)


def _store_cuda(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    layout.check_store("kv8_store", key, value, kv_cache, slot_mapping)
    cuda.store(key, value, kv_cache, slot_mapping)


def _store_fake(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    layout.check_one_device("kv8_store", key=key, value=value, kv_cache=kv_cache, slot_mapping=slot_mapping)


def _attention_cpu(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
) -> None:
    layout.check_attention("kv8_attention", query, kv_cache, block_table, seq_lens, query_start_loc, output)
    layout.check_scale("kv8_attention", scale)
    if (used := int(query_start_loc[-1])) > query.shape[0]:
        layout.fail("kv8_attention", "query_start_loc", f"{used} tokens", f"at most the {query.shape[0]} of query")
    if plan is None:
        _, _, block_size, kv_heads, _ = kv_cache.shape
        plan = cpu.plan(block_table, seq_lens, query_start_loc, block_size, kv_heads, query.shape[2])
    try:
        cpu.attention(query, kv_cache, block_table, output, scale, plan)
    except IndexError:  # from torch's gather of blocks: the one index that comes from outside and is not checked above
        layout.fail("kv8_attention", "block_table", "a block outside the cache", f"0 to {kv_cache.shape[0] - 1}")


def _attention_fake(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
) -> None:
    layout.check_one_device(
        "kv8_attention",
        query=query,
        kv_cache=kv_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        output=output,
    )


register(
    "kv8_store(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    fake=_store_fake,
    CPU=_store_cpu,
    CUDA=_store_cuda,
)
register(
    "kv8_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "Tensor(a!) output, float scale, Tensor[]? plan=None) -> ()",
    fake=_attention_fake,
    CPU=_attention_cpu,
)
