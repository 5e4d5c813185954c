"""`w4a8_linear` on the CPU: torch's int8 product (oneDNN with VNNI or AMX) with the rebuilt int8 weight.

The rebuilt weight, one byte a weight, is kept beside the packed one for as long as that lives: rebuilding it for every
token would take longer than the product. Memory is not what the CPU build is there to save.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvcompile.ops.w4a8.layout import unpack
from kvcompile.ops.w4a8.reference import W4A8Weight, rebuild

_CHECKSUM_WORDS = 64  # a tile
# tiles -> (what identified their content, w8' [N, K])
_REBUILT = WeakIdKeyDictionary()


def accumulate(x_q: torch.Tensor, tiles: torch.Tensor, group_params: torch.Tensor, out_features: int) -> torch.Tensor:
    """The int32 sums [M, N] of int8 [M, K] activations with a packed weight."""
    if not x_q.shape[0] or not out_features:
        return x_q.new_zeros((x_q.shape[0], out_features), dtype=torch.int32)
    return torch._int_mm(x_q, _rebuilt(tiles, group_params, out_features, x_q.shape[1]).t())


def linear(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `op.w4a8_linear`, whose checks the arguments have passed."""
    sums = accumulate(x_q, tiles, group_params, channel_scales.shape[0])
    y = sums.float().mul_(x_scale[:, None]).mul_(channel_scales)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def _rebuilt(tiles: torch.Tensor, group_params: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    # By content: a reload in vLLM writes into the tensors' storage, past torch's version counter.
    key = (out_features, in_features, _checksum(tiles), _checksum(group_params))
    known = _REBUILT.get(tiles)
    if known is None or known[0] != key:
        parts = unpack(tiles, group_params, out_features, in_features)
        weight = rebuild(W4A8Weight(*parts, tiles.new_ones(out_features, dtype=torch.float32)))
        _REBUILT[tiles] = known = (key, weight)
    return known[1]


def _checksum(packed: torch.Tensor) -> tuple[bytes, bytes]:
    """Sums along rows and along columns of the bytes as a matrix: equal sums in another order are told apart."""
    words = packed.view(torch.int64).flatten()
    matrix = words.reshape(-1, _CHECKSUM_WORDS if words.numel() % _CHECKSUM_WORDS == 0 else 4)
    return matrix.sum(0).numpy().tobytes(), matrix.sum(1).numpy().tobytes()
