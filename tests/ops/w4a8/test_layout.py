"""The packed layout: there and back, and each nibble where layout.py says."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.w4a8 import pack, quantize, unpack
from kvcompile.ops.w4a8.reference import codes
from tests.ops.w4a8.weights import make_weight

SHAPES = [(16, 64, 64), (1, 64, 64), (17, 128, 64), (33, 4304, 4304), (100, 576, 192), (31, 512, 128), (16, 16, 16)]


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_unpacking_gives_back_what_was_packed(rows: int, columns: int, group: int) -> None:
    weight, tiles, group_params = make_weight(rows, columns, group)
    assert tiles.shape == (-(-rows // 16), -(-columns // 64), 512)
    assert group_params.shape == (tiles.shape[0], columns // group, 32)
    for one, other in zip(unpack(tiles, group_params, rows, columns), weight, strict=False):
        assert torch.equal(one, other)


def test_every_nibble_lies_where_the_layout_says() -> None:
    weight, tiles, group_params = make_weight(40, 192, 64)
    values = codes(weight)
    for tile in range(3):
        for block in range(3):
            for lane in range(32):
                r, q = lane // 4, lane % 4
                for half in range(2):
                    row = tile * 16 + half * 8 + r
                    for word in range(2):
                        for byte in range(4):
                            at = int(tiles[tile, block, lane * 16 + half * 8 + word * 4 + byte])
                            column = block * 64 + 16 * q + 8 * word + byte
                            if row < 40:
                                assert (at & 15, at >> 4) == (values[row, column], values[row, column + 4])
        for r in range(8):
            for half in range(2):
                row = tile * 16 + half * 8 + r
                if row < 40:
                    for group in range(3):
                        pair = group_params[tile, group, r * 4 + half * 2 : r * 4 + half * 2 + 2].tolist()
                        assert pair == [weight.group_scales[row, group], weight.group_zeros[row, group]]


def test_channels_that_fill_up_a_tile_rebuild_to_zero() -> None:
    weight, tiles, group_params = make_weight(5, 80, 80)
    qweight, scales, zeros = unpack(tiles, group_params, 16, 128)
    values = torch.stack((qweight & 15, qweight >> 4), -1).flatten(1).int()
    assert torch.equal(values[:5, 80:], zeros[:5].int().expand(-1, 48))
    assert not ((values - zeros.int()) * scales.int())[5:].any()


def test_a_weight_out_of_range_is_not_packed() -> None:
    weight = quantize(torch.randn(4, 64), 64)
    with pytest.raises(ValueError, match="rebuilds to"):
        pack(weight._replace(group_scales=torch.full_like(weight.group_scales, 200)))
