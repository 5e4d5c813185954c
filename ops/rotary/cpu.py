"""The CPU implementation in plain torch; operation for operation that of the CUDA kernel, so also its reference."""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::rotary` after its checks. Raises IndexError for a position that the table does not have."""
    cos, sin = cos_sin_cache.index_select(0, positions).float().unsqueeze(1).chunk(2, -1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(1, (-1, cos_sin_cache.shape[1])).float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype).flatten(1)

    return turned(query), turned(key)
