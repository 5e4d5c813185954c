"""KV8 attention on a GPU: vLLM's own Triton int8 kernels, held to the layout that all of kvcompile shares."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE
from kvcompile.ops.kv8 import HEAD_SIZES


class KV8TritonBackend(TritonAttentionBackend):
    """int8 data and one fp32 scale per token and KV head, (blocks, 2, block size, KV heads, head size + 4), NHD."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [KV8_CACHE_DTYPE]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            # One storage for all layers would make every layer's scale views alias those of the first.
            raise NotImplementedError("the KV8 cache is laid out layer by layer")
        return (0, 1, 2, 3, 4)
