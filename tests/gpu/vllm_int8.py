"""vLLM's own int8 attention on the same cache, as an oracle."""

from __future__ import annotations

import torch

from kvcompile.tools.bench_attention_systems import Triton


def triton_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
) -> None:
    """As `kv8_decode`, on vLLM's Triton kernels."""
    Triton(query, kv_cache)(query, block_table, seq_lens, int(seq_lens.max()), output, scale)
