"""What `critical` weighs values by, on CUDA: norms after the output projection, by torch's matrix products."""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import SCALE_BYTES
from kvcompile.ops.prune import pages

TILE_ELEMENTS = 32 << 20  # of a product [tokens, hidden]: 128 MiB of fp32


def projected_norm(
    kv_cache: torch.Tensor, block_table_row: torch.Tensor, span: range, output_weight: torch.Tensor, heads: int
) -> torch.Tensor:
    """fp32 [G, n]: L1 norm of each value after a query head's part of the projection, averaged over the r heads.

    output_weight: [hidden, H * d]. In half precision int8 data is exact, and sums are in fp32; scales multiply norms.
    """
    kv_heads, head_size = kv_cache.shape[3], kv_cache.shape[4] - SCALE_BYTES
    ratio = heads // kv_heads
    step = max(1, TILE_ELEMENTS // output_weight.shape[0])
    norm = torch.zeros((kv_heads, len(span)), dtype=torch.float32, device=kv_cache.device)
    for begin in range(span.start, span.stop, step):
        end = min(begin + step, span.stop)
        raw = pages.read_raw(kv_cache, block_table_row, pages.VALUES, begin, end).transpose(0, 1)
        of_tile = norm[:, begin - span.start : end - span.start]
        data = raw[..., :-SCALE_BYTES].to(output_weight.dtype)
        for head, part in enumerate(output_weight.split(head_size, 1)):
            if output_weight.dtype == torch.float32:
                product = data[head // ratio] @ part.t()
            else:
                product = torch.mm(data[head // ratio], part.t(), out_dtype=torch.float32)
            of_tile[head // ratio] += torch.linalg.vector_norm(product, ord=1, dim=-1)
        of_tile *= raw.contiguous().view(torch.float32)[..., -1] / ratio
    return norm
