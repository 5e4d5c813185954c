"""KV8 attention on a GPU: vLLM's backend contract around kv8_store, kv8_decode and, for prompts, flash attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcompile.integrations.vllm import attention_prefill
from kvcompile.integrations.vllm.attention_prefill import Prompts
from kvcompile.integrations.vllm.attention_shared import KV8BackendBase, KV8ImplBase, observe
from kvcompile.integrations.vllm.prune_jobs import Job
from kvcompile.ops.kv8 import cuda, kv8_decode, kv8_store

OLDEST = DeviceCapability(8, 0)


@dataclass(frozen=True)
class KV8Metadata:
    """One step's batch, shared by all layers: `decodes` rows of one token, then those of `prompts`.

    `slot_mapping` int64 [num_tokens], negative where nothing is stored. `seq_lens` int32 and `block_table` int32
    [decodes, columns] are the runner's persistent buffers and `plan` (see plan.cu) the builder's, so that a CUDA graph
    finds the next step's contents in them. `jobs`: rows, of either kind, whose prompt is to be pruned; for them
    `starts` int32 [R + 1], first tokens of all rows, on the CPU, and `rows` int32 [R, columns], the block table.
    `settled`: there are decodes alone, and none reads what another one stores in this step; see `kv8_decode`.
    """

    num_tokens: int
    slot_mapping: torch.Tensor
    decodes: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    plan: list[torch.Tensor]
    prompts: Prompts | None
    starts: torch.Tensor
    rows: torch.Tensor
    settled: bool
    jobs: dict[int, Job] = field(default_factory=dict)


class KV8MetadataBuilder(AttentionMetadataBuilder[KV8Metadata]):
    """Divides a step's rows into decodes and prompts, and plans either once for all layers."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # rows of one token come first

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        self.block_size = kv_cache_spec.block_size
        heads, kv_heads = model.get_num_attention_heads(vllm_config.parallel_config), kv_cache_spec.num_kv_heads
        head_size = kv_cache_spec.head_size
        cuda.prepare(device, head_size, kv_heads, heads // kv_heads, model.dtype, self.block_size)
        rows = vllm_config.scheduler_config.max_num_seqs
        self.offsets = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.first_page = torch.zeros(rows, dtype=torch.int32, device=device)
        self.workspace_tokens = attention_prefill.workspace_tokens(kv_heads, head_size)
        # With a prefix cache a row may have found, in this very step and anywhere, a page that another row fills in it.
        self.rows_share = vllm_config.cache_config.enable_prefix_caching

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KV8Metadata:
        common = common_attn_metadata
        decodes, prompts, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        seq_lens, block_table = common.seq_lens[:decodes], common.block_table_tensor[:decodes]
        plan = [self.offsets, self.first_page]
        if decodes:
            cuda.plan_into(block_table, seq_lens, self.block_size, *plan)
        return KV8Metadata(
            num_tokens=common.num_actual_tokens,
            # Longer than there are tokens, where a batch is padded.
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            decodes=decodes,
            seq_lens=seq_lens,
            block_table=block_table,
            plan=plan,
            prompts=attention_prefill.plan(common, decodes, self.block_size, self.workspace_tokens)
            if prompts
            else None,
            starts=common.query_start_loc_cpu,
            rows=common.block_table_tensor,
            settled=not (self.rows_share or prompts),
        )


class KV8Impl(KV8ImplBase[KV8Metadata]):
    """Store the step's K and V as int8; rows of one token attend over the cache, prompts also to their own K and V."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flash = attention_prefill.Flash(self.head_size)

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
        if attn_metadata is None:  # vLLM's profile run: there is no cache yet, and memory that is used later is counted
            attention_prefill.workspace(key)
            return output.zero_()
        m = attn_metadata
        kv8_store(key, value, kv_cache, m.slot_mapping)
        if n := m.decodes:
            kv8_decode(query[:n], kv_cache, m.block_table, m.seq_lens, output[:n], self.scale, m.plan, m.settled)
        if m.prompts is not None:
            new = slice(n, m.num_tokens)
            attention_prefill.attend(
                query[new], key[new], value[new], kv_cache, m.prompts, output[new], self.scale, self.flash
            )
        observe(m.jobs, layer.layer_name, query, key, value, kv_cache, m.starts, m.rows, self.scale)
        return output


class KV8CUDABackend(KV8BackendBase):
    """KV8 on a GPU of compute capability 8.0 or later."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_impl_cls() -> type[KV8Impl]:
        return KV8Impl

    @staticmethod
    def get_builder_cls() -> type[KV8MetadataBuilder]:
        return KV8MetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= OLDEST
