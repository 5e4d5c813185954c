"""KV8 attention on a CPU: vLLM's backend contract around `kvcompile::kv8_store` and `kvcompile::kv8_attention`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcompile.integrations.vllm.attention_shared import KV8BackendBase, KV8ImplBase, observe
from kvcompile.integrations.vllm.prune_jobs import Job
from kvcompile.ops.kv8 import kv8_attention, kv8_store, plan_attention, plan_decode


@dataclass(frozen=True)
class KV8Metadata:
    """One step's batch, shared by all layers. R rows (requests), T tokens.

    `starts` int32 [R + 1], `seq_lens` int32 [R] (context and new tokens), `block_table` int32 [R, columns],
    `slot_mapping` int64 [T], negative where nothing is stored. `plan`: what `plan_attention` made of them. The table
    and the lengths are without the pages that a pruned request has released; `rows` are whole. A prompt that is stored
    inline has length 0: it is in no cache. `jobs`: rows whose prompt is to be pruned.
    """

    num_tokens: int
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    rows: torch.Tensor
    slot_mapping: torch.Tensor
    plan: list[torch.Tensor]
    jobs: dict[int, Job] = field(default_factory=dict)


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
        table, lengths = plan_decode(common.block_table_tensor, common.seq_lens, spec.block_size)
        # With more new tokens than there are pages for: of a prompt that is stored inline.
        lengths = lengths.masked_fill(common.query_start_loc.diff() > lengths, 0)
        batch = (table, lengths, common.query_start_loc)
        return KV8Metadata(
            num_tokens=common.num_actual_tokens,
            block_table=table,
            rows=common.block_table_tensor,
            seq_lens=lengths,
            starts=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            plan=plan_attention(*batch, spec.block_size, spec.num_kv_heads, spec.head_size),
        )


class KV8Impl(KV8ImplBase[KV8Metadata]):
    """Store the step's K and V as int8, then attend over the int8 cache."""

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
        kv8_attention(query[:n], kv_cache, m.block_table, m.seq_lens, m.starts, output[:n], self.scale, m.plan)

        def attend(new: slice, cache: torch.Tensor, pages: torch.Tensor) -> None:
            ends = torch.tensor([0, new.stop - new.start], dtype=torch.int32)
            kv8_attention(query[new], cache, pages[None], ends[1:], ends, output[new], self.scale)

        observe(m.jobs, layer.layer_name, query, key, value, kv_cache, m.starts, m.rows, self.scale, attend)
        return output


class KV8CPUBackend(KV8BackendBase):
    """KV8 on a CPU, in fp32 too."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_impl_cls() -> type[KV8Impl]:
        return KV8Impl

    @staticmethod
    def get_builder_cls() -> type[KV8MetadataBuilder]:
        return KV8MetadataBuilder
