"""W4A8 linears: 4-bit weights on an int8 grid, int8 activations, exact int32 sums."""

from kvcompile.ops.w4a8.layout import pack, unpack
from kvcompile.ops.w4a8.op import w4a8_linear
from kvcompile.ops.w4a8.reference import (
    W4A8Weight,
    check_group,
    check_weight,
    dequantize,
    encode,
    group_grid,
    is_legal_group,
    legal_group,
    quantize,
    rebuild,
)

__all__ = [
    "W4A8Weight",
    "check_group",
    "check_weight",
    "dequantize",
    "encode",
    "group_grid",
    "is_legal_group",
    "legal_group",
    "pack",
    "quantize",
    "rebuild",
    "unpack",
    "w4a8_linear",
]
