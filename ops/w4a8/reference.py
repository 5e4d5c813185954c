"""Two-level weight quantisation of QServe / QoQ (Lin et al., MLSys 2025), and what the packed weight stands for.

N output channels, K input channels, g weights a group, G = K / g groups a row. Per channel, int8 within +-119; per
group, 4 bits on the int8 grid:

    s1[n]   = max_k |w[n,k]| / 119                      w8 = round(w / s1)
    s2[n,j] = max(round(r / 15), ceil(r / 16), 1)       r = max - min of w8 in the group      (min <= 0 <= max)
    z[n,j]  = round(-min / s2)
    w4      = clamp(round(w8 / s2) + z, 0, 15)          w8' = (w4 - z) * s2           in -128..127

119 is the protective range: a rebuilt value is at most half a step of 16 further out, so it never wraps. Rounding is
half to even. ceil(r / 16) bounds what 16 levels may cut off at one step: rounding alone would cut a range of 22 down to
15. Because w8' is int8 with one scale per channel, a W4A8 product is a W8A8 product on w8', bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PROTECTIVE_RANGE = 119
GROUP_STEP = 64  # channels that one step of the kernels covers; a group is a multiple of it
CHANNEL_STEP = 16  # bytes of activations in one access; K is a multiple of it, whatever the group
# The int32 sum holds this many products of -128 * -128.
MAX_IN_FEATURES = (2**31 - 1) // 128**2 // GROUP_STEP * GROUP_STEP


class W4A8Weight(NamedTuple):
    """A quantised weight as a checkpoint holds it; it can be sliced along N, and along K in units of the group.

    qweight: uint8 [N, K / 2], byte j of a row is w4[2j] | w4[2j + 1] << 4. group_scales (s2, at least 1) and
    group_zeros (z, 0 to 15): uint8 [N, G]. channel_scales (s1): fp32 [N].
    """

    qweight: torch.Tensor
    group_scales: torch.Tensor
    group_zeros: torch.Tensor
    channel_scales: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * 2

    @property
    def group_size(self) -> int:
        return self.in_features // self.group_scales.shape[1]


def is_legal_group(in_features: int, group_size: int) -> bool:
    """Whether the kernels run rows of `in_features` in groups of `group_size`; K itself is one group per channel."""
    if group_size == in_features:
        return in_features > 0 and in_features % CHANNEL_STEP == 0
    return group_size > 0 and group_size % GROUP_STEP == 0 and in_features % group_size == 0


def legal_group(in_features: int, wanted: int) -> int:
    """The largest legal group of at most `wanted` channels (1 or more), or all K in one group if there is none.

    Raises ValueError if K is not a multiple of 16, which no group makes right.
    """
    _refuse_no_count("in_features", in_features)
    _refuse_no_count("wanted", wanted)
    if wanted < 1:
        raise ValueError(f"wanted is {wanted}; allowed is a whole number from 1")
    if in_features <= 0 or in_features % CHANNEL_STEP:
        raise ValueError(f"in_features is {in_features}; allowed are positive multiples of {CHANNEL_STEP}")
    for group in range(min(wanted, in_features) // GROUP_STEP * GROUP_STEP, 0, -GROUP_STEP):
        if is_legal_group(in_features, group):
            return group
    return in_features


def check_group(in_features: int, group_size: int) -> None:
    """Raise ValueError, naming both numbers, unless the group is legal."""
    if in_features > MAX_IN_FEATURES:
        raise ValueError(f"in_features is {in_features}; int32 sums hold at most {MAX_IN_FEATURES}")
    if not is_legal_group(in_features, group_size):
        raise ValueError(
            f"group size {group_size} does not fit {in_features} input channels; allowed is a multiple of {GROUP_STEP} "
            f"that divides them, or all of them where they are a multiple of {CHANNEL_STEP}"
        )


def _refuse_no_count(name: str, value: object) -> None:
    if type(value) is not int:  # True and 64.0 would pass for whole numbers
        raise ValueError(f"{name} is {value!r}; allowed is a whole number from 1")


def quantize(weight: torch.Tensor, group_size: int) -> W4A8Weight:
    """Round `weight`, [N, K] of any float dtype and finite, to the nearest W4A8 weight. The argument is left alone.

    A row of zeros gets the channel scale 1. Raises ValueError for an illegal group or a value that is not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}; allowed is a float matrix [N, K]")
    _refuse_no_count("group_size", group_size)
    check_group(weight.shape[1], group_size)
    wide = weight.float()
    top = wide.abs().amax(dim=1)
    if not bool(torch.isfinite(top).all()):
        raise ValueError(f"weight is not finite in row {int((~torch.isfinite(top)).nonzero()[0])}")
    # A denormal row must not get a scale of zero.
    scales = (top / PROTECTIVE_RANGE).clamp(min=torch.finfo(torch.float32).tiny)
    scales = torch.where(top == 0, torch.ones_like(scales), scales)
    level1 = (wide / scales[:, None]).round_()
    group_scales, group_zeros = group_grid(level1.unflatten(1, (-1, group_size)))
    return encode(level1, scales, group_scales, group_zeros)


def group_grid(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s2, z) by the formula above, float of `groups`' shape less its last dimension, for values on the int8 grid."""
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    span = high - low
    scales = torch.maximum((span / 15).round(), (span / 16).ceil()).clamp(min=1)
    return scales, (-low / scales).round().clamp(0, 15)


def encode(
    level1: torch.Tensor, channel_scales: torch.Tensor, group_scales: torch.Tensor, group_zeros: torch.Tensor
) -> W4A8Weight:
    """The weight nearest to `level1` (float [N, K], on the int8 grid or between) on a given grid.

    channel_scales: [N]; group_scales, group_zeros: [N, G], whole numbers of any dtype. Raises ValueError if a value
    would rebuild outside int8.
    """
    groups = level1.unflatten(1, (group_scales.shape[1], -1))
    scales, zeros = group_scales[..., None].float(), group_zeros[..., None].float()
    codes = ((groups / scales).round() + zeros).clamp(0, 15).to(torch.uint8).flatten(1)
    weight = W4A8Weight(
        (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(),
        group_scales.to(torch.uint8),
        group_zeros.to(torch.uint8),
        channel_scales.float(),
    )
    check_weight(weight)
    return weight


def codes(weight: W4A8Weight) -> torch.Tensor:
    """The 4-bit values, uint8 [N, K]."""
    return torch.stack((weight.qweight & 15, weight.qweight >> 4), dim=-1).flatten(1)


def _rebuilt(weight: W4A8Weight) -> torch.Tensor:
    """(w4 - z) * s2 before it is checked, int16 [N, G, g]."""
    values = codes(weight).to(torch.int16).unflatten(1, (weight.group_scales.shape[1], -1))
    return (values - weight.group_zeros[..., None].short()) * weight.group_scales[..., None].short()


def rebuild(weight: W4A8Weight) -> torch.Tensor:
    """w8' = (w4 - z) * s2, int8 [N, K]. Raises ValueError if the weight is malformed or leaves int8 anywhere."""
    check_weight(weight)
    return _rebuilt(weight).to(torch.int8).flatten(1)


def dequantize(weight: W4A8Weight) -> torch.Tensor:
    """The float weight that it stands for, w8' * s1, fp32 [N, K]."""
    return rebuild(weight).float() * weight.channel_scales[:, None]


def check_weight(weight: W4A8Weight) -> None:
    """Raise ValueError for wrong shapes or dtypes, an illegal group, or a value that does not rebuild to int8."""
    dtypes = (torch.uint8, torch.uint8, torch.uint8, torch.float32)
    for name, tensor, dtype in zip(W4A8Weight._fields, weight, dtypes, strict=True):
        dim = 1 if name == "channel_scales" else 2
        if tensor.dtype != dtype or tensor.dim() != dim or tensor.shape[0] != weight.out_features:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; allowed is {dtype} with {dim} dimensions, the first "
                f"of {weight.out_features}"
            )
    if weight.group_scales.shape != weight.group_zeros.shape or not weight.group_scales.shape[1]:
        raise ValueError(
            f"group_scales are {list(weight.group_scales.shape)}, group_zeros {list(weight.group_zeros.shape)}; "
            "allowed are equal shapes [N, K / group size]"
        )
    count, groups = weight.in_features, weight.group_scales.shape[1]
    if count % groups:
        raise ValueError(f"{count} input channels do not divide into {groups} groups")
    check_group(count, weight.group_size)
    if bool((weight.group_scales == 0).any()):
        raise ValueError("group_scales hold a 0; allowed is 1 and more")
    if bool((weight.group_zeros > 15).any()):
        raise ValueError(f"group_zeros hold {int(weight.group_zeros.max())}; allowed is 0 to 15")
    if not bool((torch.isfinite(weight.channel_scales) & (weight.channel_scales > 0)).all()):
        raise ValueError("channel_scales hold a value that is not finite and above 0")
    values = _rebuilt(weight)
    outside = ((values < -128) | (values > 127)).any(dim=-1)
    if bool(outside.any()):
        row, group = (int(i) for i in outside.nonzero()[0])
        worst = values[row, group]
        raise ValueError(
            f"row {row}, group {group} rebuilds to {int(worst.min())}..{int(worst.max())}; allowed is -128..127"
        )
