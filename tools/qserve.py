"""The weights of QServe / OmniServe checkpoints (Lin et al., MLSys 2025), turned into this project's plain layout.

What the published kernels (`qgemm/w4a8_per_group`, `w4a8_per_chn`) read, for N output and K input channels:

    qweight    int8 [N, K/2]    tiles of 32 by 32, N/32 by K/32 of them, 512 bytes each, in the order [c, e, d, b, f]
                                with n = 16a + 8b + c and k = 16d + 4e + f (c < 8, e < 4, f < 4, the others < 2);
                                the low nibble is a = 0, the high one a = 1
    s1_scales  fp16 [N]
  per group:
    s2_scales  int8 [K/g, N]    each 32 channels in the order 0, 8, 16, 24, 1, 9, ...
    s2_zeros   int8 [K/g, N]    -z * s2 modulo 256, in the same order
    w = s1 * int8(w4 * s2 + s2_zeros), the int8 as four lanes of one 32-bit product and a sum modulo 256
  per channel:
    s1_szeros  fp16 [N]         z * s1
    w = s1 * w4 - s1_szeros, the second term times the sum of the activations before they are quantised

Both are exactly this project's (w4 - z) * s2 * s1 (s2 = 1 per channel) as long as z is a whole number of 0..15 and no
value wraps, which is checked: whatever is not representable is refused, never approximated. (The sum of activations
after quantisation, which follows from our formula, is the one difference per channel; it is the more exact one.)
"""

from __future__ import annotations

import torch

from kvcompile.ops.w4a8 import W4A8Weight, check_weight

TILE = 32
# s1 and z * s1 were each rounded to fp16 (2^-11 at most), perhaps independently.
_ROUNDING = 2.0**-10


def convert(tensors: dict[str, torch.Tensor]) -> W4A8Weight:
    """The weight that a linear's tensors (by the names above) stand for.

    Raises ValueError, saying which row and why, for tensors that do not belong together or a weight that this format
    does not hold exactly.
    """
    grouped, per_channel = {"s2_scales", "s2_zeros"} <= tensors.keys(), "s1_szeros" in tensors
    if grouped == per_channel or not {"qweight", "s1_scales"} <= tensors.keys():
        raise ValueError(
            f"has {', '.join(sorted(tensors))}; allowed are qweight and s1_scales with either s2_scales and s2_zeros "
            "or s1_szeros"
        )
    for name in tensors.keys() & {"s1_scales", "s1_szeros"}:
        if not tensors[name].is_floating_point():
            raise ValueError(f"{name} is {tensors[name].dtype}; allowed is torch.float16")
    codes, s1 = _codes(tensors["qweight"]), tensors["s1_scales"].float()
    if s1.shape != (codes.shape[0],):
        raise ValueError(f"s1_scales is {list(s1.shape)}; allowed is [{codes.shape[0]}], one a row of qweight")
    if grouped:
        codes, s2, zeros = _by_group(codes, tensors["s2_scales"], tensors["s2_zeros"])
    else:
        s2 = torch.ones(len(codes), 1, dtype=torch.uint8)
        zeros = _channel_zeros(s1, tensors["s1_szeros"].float())
    weight = W4A8Weight((codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), s2, zeros, s1)
    check_weight(weight)
    return weight


def _codes(qweight: torch.Tensor) -> torch.Tensor:
    """The 4-bit weights, uint8 [N, K]."""
    shape = list(qweight.shape)
    if qweight.dtype != torch.int8 or len(shape) != 2 or shape[0] % TILE or shape[1] * 2 % TILE or 0 in shape:
        raise ValueError(
            f"qweight is {qweight.dtype} {shape}; allowed is torch.int8 [N, K / 2], N and K multiples of 32"
        )
    rows, columns = shape[0], shape[1] * 2
    packed = qweight.contiguous().view(torch.uint8).view(rows // TILE, columns // TILE, 8, 4, 2, 2, 4)
    nibbles = torch.stack((packed & 15, packed >> 4))  # [a, N / 32, K / 32, c, e, d, b, f]
    return nibbles.permute(1, 0, 6, 3, 2, 5, 4, 7).reshape(rows, columns)


def _per_group(name: str, stored: torch.Tensor, rows: int) -> torch.Tensor:
    """[N, G] as int64 of 0..255, from [G, N] in the kernel's order."""
    if stored.dtype != torch.int8 or stored.dim() != 2 or stored.shape[1] != rows or not len(stored):
        raise ValueError(f"{name} is {stored.dtype} {list(stored.shape)}; allowed is torch.int8 [K / group, {rows}]")
    ordered = stored.contiguous().view(torch.uint8).view(len(stored), rows // TILE, 8, 4).transpose(2, 3)
    return ordered.reshape(len(stored), rows).t().long()


def _by_group(
    codes: torch.Tensor, s2_scales: torch.Tensor, s2_zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, s2, z), z the whole number with -z * s2 = s2_zeros modulo 256 by which no weight of the group wraps."""
    rows, columns = codes.shape
    scales, added = _per_group("s2_scales", s2_scales, rows), _per_group("s2_zeros", s2_zeros, rows)
    if scales.shape != added.shape or columns % scales.shape[1]:
        raise ValueError(
            f"s2_scales is {list(s2_scales.shape)}, s2_zeros {list(s2_zeros.shape)}; allowed are equal shapes with a "
            f"first dimension that divides {columns}"
        )
    groups = codes.view(rows, scales.shape[1], -1)
    constant = (scales == 0) & (added == 0)  # a group of zeros, whatever its codes
    groups = torch.where(constant[..., None], 0, groups)
    scales = torch.where(constant, 1, scales)
    low, high = groups.amin(-1).long(), groups.amax(-1).long()
    _refuse(high * scales > 255, "its codes times s2 exceed 255, which QServe's kernel carries into other weights")
    zeros, congruent = torch.full_like(scales, -1), torch.zeros_like(constant)
    for z in range(16):
        equal = (z * scales + added) % 256 == 0
        congruent |= equal
        fits = equal & ((high - z) * scales <= 127) & ((low - z) * scales >= -128)
        zeros = torch.where(fits & (zeros < 0), z, zeros)
    _refuse(~congruent, "its zero point is not a whole number of 0 to 15 times s2, as this format has it")
    _refuse(zeros < 0, "it has weights that wrap around int8")
    return groups.reshape(rows, columns), scales.to(torch.uint8), zeros.to(torch.uint8)


def _channel_zeros(s1: torch.Tensor, szeros: torch.Tensor) -> torch.Tensor:
    """z of one group per row, uint8 [N, 1]."""
    if szeros.shape != s1.shape:
        raise ValueError(f"s1_szeros is {list(szeros.shape)}; allowed is {list(s1.shape)}, one a row of qweight")
    exact = szeros.double() / s1.double()
    zeros = exact.round()
    wrong = ~((zeros >= 0) & (zeros <= 15) & ((exact - zeros).abs() <= zeros * _ROUNDING))
    _refuse(wrong[:, None], "its zero point is not a whole number of 0 to 15 times s1, as this format has it")
    return zeros.to(torch.uint8)[:, None]


def _refuse(wrong: torch.Tensor, why: str) -> None:
    if bool(wrong.any()):
        row, group = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"row {row}, group {group}: {why}")
