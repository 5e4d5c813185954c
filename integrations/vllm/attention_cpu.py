"""KV8 attention on a CPU: vLLM's backend contract around `kvcompile::kv8_store` and `kvcompile::kv8_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE
from kvcompile.ops.kv8 import HEAD_SIZES, kv8_attention, kv8_store, kv_cache_shape, plan_attention


@dataclass(frozen=True)
class KV8Metadata:
    """One step's batch, shared by all layers. R rows (requests), T tokens.

    `query_start_loc` int32 [R + 1], `seq_lens` int32 [R] (context and new tokens), `block_table` int32 [R, columns],
    `slot_mapping` int64 [T], negative where nothing is stored. `plan`: what `plan_attention` made of them.
    """

    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    plan: list[torch.Tensor]


class KV8MetadataBuilder(AttentionMetadataBuilder[KV8Metadata]):
    """Hands on what the runner prepared (its tensors are the CPU's own, nothing is copied) and plans the step once."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KV8Metadata:
        common, spec = common_attn_metadata, self.kv_cache_spec
        batch = (common.block_table_tensor, common.seq_lens, common.query_start_loc)
        return KV8Metadata(
            num_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            plan=plan_attention(*batch, spec.block_size, spec.num_kv_heads, spec.head_size),
        )


class KV8Impl(AttentionImpl[KV8Metadata]):
    """Store the step's K and V as int8, then attend over the int8 cache."""

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

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KV8Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, H, d], key and value [T, G, d], kv_cache int8 (blocks, 2, block size, G, d + 4); fills output."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("the KV8 backend does not quantise its output")
        if attn_metadata is None:  # vLLM's profile run: there is no cache yet
            return output.zero_()
        m, n = attn_metadata, attn_metadata.num_tokens
        kv8_store(key[:n], value[:n], kv_cache, m.slot_mapping[:n])
        kv8_attention(query[:n], kv_cache, m.block_table, m.seq_lens, m.query_start_loc, output[:n], self.scale, m.plan)
        return output


class KV8CPUBackend(AttentionBackend):
    """int8 data and one fp32 scale per token and KV head; the same layout as on a GPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [KV8_CACHE_DTYPE]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KV8Impl]:
        return KV8Impl

    @staticmethod
    def get_builder_cls() -> type[KV8MetadataBuilder]:
        return KV8MetadataBuilder

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

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False
