"""The KV8 attention backend, registered as vLLM's CUSTOM backend: the implementation for the platform at hand."""

from __future__ import annotations

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from kvcompile.integrations.vllm.attention_cpu import KV8CPUBackend as KV8AttentionBackend
else:
    from kvcompile.integrations.vllm.attention_cuda import KV8CUDABackend as KV8AttentionBackend

__all__ = ["KV8AttentionBackend"]
