"""The layout that the kernels read, and the way there from a checkpoint's.

A tile is 16 output channels by 64 input channels, 512 bytes: 16 bytes for each of the 32 lanes of a warp. Lane
l = 4 r + q holds channels r and r + 8, for each the 16 input channels from 16 q on, as two 32-bit words:

    bytes  0-3   channel r       byte i: w4[16q + i]     | w4[16q + 4 + i]  << 4
    bytes  4-7   channel r       byte i: w4[16q + 8 + i] | w4[16q + 12 + i] << 4
    bytes  8-15  channel r + 8   likewise

so that a word's low and high nibbles are two A registers of mma.m16n8k32, and the 16 activations that go with them are
one 16-byte access. `tiles` is uint8 [ceil(N / 16), ceil(K / 64), 512]; padding channels rebuild to zero.

`group_params` is uint8 [ceil(N / 16), G, 32]: for each r of 0..7 the bytes s2[r], z[r], s2[r + 8], z[r + 8].
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvcompile.ops.w4a8.reference import W4A8Weight, check_weight, codes

TILE_ROWS = 16
TILE_COLUMNS = 64
TILE_BYTES = TILE_ROWS * TILE_COLUMNS // 2


def tiles_along(count: int, tile: int) -> int:
    """Tiles of `tile` channels that `count` of them take."""
    return -(-count // tile)


def pack(weight: W4A8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(tiles, group_params) of a weight, on its device. Raises ValueError as `check_weight` does."""
    check_weight(weight)
    rows, columns = weight.out_features, weight.in_features
    row_pad = -rows % TILE_ROWS
    scales = pad(weight.group_scales, (0, 0, 0, row_pad), value=1)
    zeros = pad(weight.group_zeros, (0, 0, 0, row_pad))
    # Input channels past K belong to the last group; its zero point rebuilds to zero.
    values = pad(codes(weight), (0, 0, 0, row_pad))
    if column_pad := -columns % TILE_COLUMNS:
        values = torch.cat((values, zeros[:, -1:].expand(-1, column_pad)), dim=1)
    # [tile row, half, r, tile column, q, word, nibble, byte]
    split = values.reshape(-1, 2, 8, values.shape[1] // TILE_COLUMNS, 4, 2, 2, 4)
    words = split[..., 0, :] | split[..., 1, :] << 4
    tiles = words.permute(0, 3, 2, 4, 1, 5, 6).reshape(split.shape[0], split.shape[3], TILE_BYTES)
    params = torch.stack((scales, zeros), dim=-1).reshape(-1, 2, 8, scales.shape[1], 2)
    return tiles.contiguous(), params.permute(0, 3, 2, 1, 4).reshape(params.shape[0], -1, 32).contiguous()


def unpack(
    tiles: torch.Tensor, group_params: torch.Tensor, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qweight, group_scales, group_zeros) of the checkpoint layout: the inverse of `pack`."""
    words = tiles.reshape(tiles.shape[0], tiles.shape[1], 8, 4, 2, 2, 4).permute(0, 4, 2, 1, 3, 5, 6)
    values = torch.stack((words & 15, words >> 4), dim=-2).reshape(tiles.shape[0] * TILE_ROWS, -1)
    values = values[:out_features, :in_features]
    params = group_params.reshape(group_params.shape[0], -1, 8, 2, 2).permute(4, 0, 3, 2, 1)
    scales, zeros = params.reshape(2, -1, group_params.shape[1])[:, :out_features]
    return (values[:, 0::2] | values[:, 1::2] << 4).contiguous(), scales.contiguous(), zeros.contiguous()
