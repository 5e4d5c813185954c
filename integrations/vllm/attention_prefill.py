"""Prompts over the int8 cache: their own keys and values as they are, earlier context a workspace at a time.

    out, lse = flash(q, k, v, causal)                              the chunk itself, bf16 or fp16
    for each span of the context:                                  of at most `workspace_tokens` tokens in all
        k', v' = kv8_dequantise(cache, span)
        out, lse = merge(out, lse, flash(q, k', v'))               by their log-sum-exps

A prompt that fits one chunk never reads the cache, so it is computed as without quantisation. Flash attention is the
platform's, in the version that vLLM picks (FA3 on compute capability 9.0).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvcompile.ops.kv8 import kv8_dequantise

WORKSPACE_BYTES = 64 << 20  # of keys and values together, for all layers


@dataclass(frozen=True)
class Span:
    """Context positions begins[r] and on of row r, tokens starts[r] to starts[r + 1] of the workspace.

    starts: int32 [R + 1]; begins: int32 [R]; most: no row has more tokens of it.
    """

    starts: torch.Tensor
    begins: torch.Tensor
    most: int


@dataclass(frozen=True)
class Prompts:
    """Rows of more than one token. starts: int32 [R + 1], their tokens from 0; longest: the most tokens of one."""

    starts: torch.Tensor
    longest: int
    block_table: torch.Tensor
    spans: list[Span] = field(default_factory=list)


class Flash:
    """vLLM's flash attention in the version that it picks for this platform and head size."""

    def __init__(self, head_size: int) -> None:
        from vllm.v1.attention.backends import fa_utils

        self._function = fa_utils.flash_attn_varlen_func
        self._version = fa_utils.get_flash_attn_version(head_size=head_size)
        if self._version is None:
            raise ValueError("the KV8 backend computes prompts with vLLM's flash attention, which this platform lacks")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        key_starts: torch.Tensor,
        longest_key: int,
        scale: float,
        *,
        causal: bool,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, H, d], and log-sum-exps fp32 [H, T]: not finite for a row without keys, whose output is unused."""
        return self._function(
            query,
            key,
            value,
            max_seqlen_q=prompts.longest,
            cu_seqlens_q=prompts.starts,
            max_seqlen_k=longest_key,
            cu_seqlens_k=key_starts,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
            out=out,
            fa_version=self._version,
        )


def workspace_tokens(kv_heads: int, head_size: int) -> int:
    """Tokens whose keys and values in 16 bits fit the workspace."""
    return WORKSPACE_BYTES // (2 * 2 * kv_heads * head_size)


def workspace(like: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values [tokens, G, d] to put context into, for key or value tensors `like` [T, G, d].

    vLLM's own, shared with whatever else needs scratch memory for the length of a call.
    """
    from vllm.v1.worker.workspace import current_workspace_manager

    _, heads, head_size = like.shape
    shape = (workspace_tokens(heads, head_size), heads, head_size)
    return current_workspace_manager().get_simultaneous((shape, like.dtype), (shape, like.dtype))


def plan(common: CommonAttentionMetadata, first: int, block_size: int, tokens: int) -> Prompts:
    """Of the rows from `first` on, without waiting for the device. tokens: of the workspace."""
    starts_cpu = common.query_start_loc_cpu[first : common.num_reqs + 1]
    lengths = starts_cpu.diff()
    starts = common.query_start_loc[first : common.num_reqs + 1]
    if first:
        starts = starts - starts[0]
    table = common.block_table_tensor[first : common.num_reqs]
    longest = int(lengths.max())
    upper = common.seq_lens_cpu_upper_bound
    if upper is None:
        raise RuntimeError("vLLM gave no bound on sequence lengths, which the KV8 backend needs to plan prompts")
    context = (upper[first : common.num_reqs] - lengths).tolist()
    shares = divide(context, tokens)
    if not shares:
        return Prompts(starts, longest, table)
    # Pages that were released lie in front, and the context that is left is shorter by them: known on the device alone.
    released = (table != 0).int().argmax(1).int() * block_size
    ends = common.seq_lens[first : common.num_reqs] - starts.diff()
    divided = [list(zip(*span, strict=True)) for span in shares]
    begins, counts = async_tensor_h2d(divided, torch.int32, starts.device, pin_memory=starts.is_cuda).unbind(1)
    begins = begins + released
    held = (torch.minimum(begins + counts, ends) - begins).clamp(min=0)
    bounds = torch.nn.functional.pad(held.cumsum(1, dtype=torch.int32), (1, 0))
    most = [max(count for _, count in span) for span in shares]
    return Prompts(starts, longest, table, [Span(*each) for each in zip(bounds, begins, most, strict=True)])


def divide(context: list[int], tokens: int) -> list[list[tuple[int, int]]]:
    """Spans of at most `tokens` tokens that hold the context of all rows: (begin, count) of each row in each span.

    Row after row, so that there are as few as can be: a long one does not make the others come again with it.
    """
    spans: list[list[tuple[int, int]]] = []
    room = 0
    for row, length in enumerate(context):
        begin = 0
        while begin < length:
            if not room:
                spans.append([(0, 0)] * len(context))
                room = tokens
            count = min(length - begin, room)
            spans[-1][row] = begin, count
            begin, room = begin + count, room - count
    return spans


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    prompts: Prompts,
    output: torch.Tensor,
    scale: float,
    flash: Flash,
) -> None:
    """Attention of the prompts' T tokens to themselves and their context, to `output`.

    query, output: [T, H, d]; key, value: [T, G, d]; kv_cache: see `ops/kv8/layout.py`.
    """
    _, lse = flash(query, key, value, prompts, prompts.starts, prompts.longest, scale, causal=True, out=output)
    if not prompts.spans:
        return
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    keys, values = workspace(key)
    for span in prompts.spans:
        kv8_dequantise(kv_cache, prompts.block_table, span.starts, span.begins, keys, values)
        part, part_lse = flash(query, keys, values, prompts, span.starts, span.most, scale, causal=False)
        merged = torch.empty_like(lse)
        merge_attn_states(output, part, part_lse, output, lse, merged)
        lse = merged
