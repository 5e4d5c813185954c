"""Compiling the kernels of pruning before the first prompt needs them."""

from __future__ import annotations

import torch

from kvcompile.ops.prune import cuda, cuda_move, cuda_select
from kvcompile.ops.prune.methods import Method


def prepare(device: torch.device, head_size: int, ratio: int, dtype: torch.dtype, method: Method) -> None:
    """Compile and load every kernel that pruning by `method` takes on a CUDA device, so that no request waits for it.

    ratio: query heads to each KV head. dtype: of the queries, bf16 or fp16. Raises what `launch.kernel` raises.
    """
    cuda.prepare(device, head_size, ratio, dtype, method)
    cuda_select.kernel(device)
    cuda_move.prepare(device, head_size)
