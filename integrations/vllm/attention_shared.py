"""What the KV8 backends of both platforms are to vLLM: the cache's shape, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType, MultipleOf

from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE
from kvcompile.integrations.vllm.prune_jobs import Job
from kvcompile.ops.kv8 import HEAD_SIZES, kv_cache_shape
from kvcompile.ops.prune import pages_of

M = TypeVar("M", bound=AttentionMetadata)


class KV8ImplBase(AttentionImpl[M], Generic[M]):
    """The numbers of a layer, and a refusal of what the kernels do not compute."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        unsupported = {
            "alibi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a logit soft cap": bool(logits_soft_cap),
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            f"KV cache dtype {kv_cache_dtype}": kv_cache_dtype != KV8_CACHE_DTYPE,
        }
        if found := [what for what, given in unsupported.items() if given]:
            raise ValueError(f"the KV8 backend does not support {', '.join(found)}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype


class KV8BackendBase(AttentionBackend):
    """int8 data and one fp32 scale per token and KV head; the same layout on every platform."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [KV8_CACHE_DTYPE]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if cache_dtype_str != KV8_CACHE_DTYPE:
            raise ValueError(f"the KV8 backend needs KV cache dtype {KV8_CACHE_DTYPE}, got {cache_dtype_str}")
        return kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)


def observe(
    jobs: Mapping[int, Job],
    layer: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    starts: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    attend: Callable[[slice, torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """Show the prompts that are to be pruned, by row, their new tokens of one layer, whose K and V the cache holds.

    query: [T, H, d] of all rows; key, value: [T, G, d]. starts: int32 [R + 1], each row's first token, on the CPU:
    nothing waits for a device. block_table: int32 [R, columns]. A prompt that is to be pruned has released nothing yet:
    its row is whole. But of one that is stored inline the cache holds nothing. It is all in this step, and is given a
    cache for the length of this call, over which `attend(tokens, cache, row)` may compute what it has to.
    """
    for row, job in jobs.items():
        new = slice(*starts[row : row + 2].tolist())
        if not job.plan.inline:
            job.observe(layer, query[new], kv_cache, block_table[row], scale)
            continue
        cache, pages = pages_of(key[new], value[new], kv_cache.shape[2])
        if attend is not None:
            attend(new, cache, pages)
        job.store(layer, query[new], cache, pages, kv_cache, block_table[row], scale)


def attach(metadata: Iterable[Any], jobs: Mapping[int, Job]) -> None:
    """Give the metadata of a step its jobs, by row; of a prompt stored inline no token is stored as it comes."""
    for each in {id(m): m for m in metadata}.values():
        each.jobs.update(jobs)
        for row, job in jobs.items():
            if job.plan.inline:
                each.slot_mapping[slice(*each.starts[row : row + 2].tolist())] = -1
