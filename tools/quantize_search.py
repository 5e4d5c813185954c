"""Two-level scales by search: the smallest squared error that the W4A8 format can reach, instead of rounding.

A weight is (w4 - z) * s2 * s1: s1 a float per output channel, s2 and z small integers per group of input channels.
Everything here works on "units": weights divided by s1, where a rebuilt weight is an integer of -128..127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.ops.w4a8 import W4A8Weight, dequantize, quantize

RANGE = 119  # the largest |unit| of rounding to nearest; beyond it a code may have to be clipped to stay in int8
_LARGEST_CODE = 15
_CLIPS = (1.0, 0.95, 0.9, 0.85, 1.05)  # of s1: below 1 clips the channel's largest weights
_S2_BELOW = 5  # of s2: steps below the one that covers the whole group, which clip both of its ends
_TINY = torch.finfo(torch.float32).tiny
_BLOCK = 1 << 17  # elements that are searched together: few enough to stay in the processor's cache


def search(weight: Tensor, group_size: int, importance: Tensor | None = None) -> W4A8Weight:
    """The best scales found for `weight`, float [N, K]; K is a multiple of `group_size`.

    Minimises sum_k importance[k] * (weight - rebuilt)^2 per output channel (`importance`: float [K], default all 1).
    No channel is worse than by rounding to nearest, and every rebuilt weight fits int8. `weight` is not changed.
    """
    weight = weight.detach().float()
    rounded = quantize(weight, group_size)
    rows = max(1, _BLOCK // weight.shape[1])
    parts = []
    for start in range(0, len(weight), rows):
        block = weight[start : start + rows]
        scale = channel_scale(block, group_size, importance)
        codes, s2, z = encode_groups(block / scale[:, None], group_size, importance)
        units = rebuilt(codes, s2, z)
        scale = refit(block, units, scale, importance)
        found = W4A8Weight(pack_codes(codes), s2, z, scale)
        plain = W4A8Weight(*(part[start : start + rows] for part in rounded))
        errors = [row_errors(block, dequantize(candidate), importance) for candidate in (found, plain)]
        better = errors[0] <= errors[1]
        parts.append([torch.where(better[:, None], a, b) for a, b in zip(found[:3], plain[:3], strict=True)])
        parts[-1].append(torch.where(better, found.channel_scales, plain.channel_scales))
    return W4A8Weight(*(torch.cat(part) for part in zip(*parts, strict=True)))


def channel_scale(weight: Tensor, group_size: int, importance: Tensor | None = None) -> Tensor:
    """The best of a few s1, float [N], for `weight`, float [N, K]; 1 for a channel of zeros."""
    largest = weight.abs().amax(1)
    unclipped = torch.where(largest > 0, (largest / RANGE).clamp_min(_TINY), 1.0)
    best, scale = torch.full_like(unclipped, torch.inf), unclipped.clone()
    grouped, weights = _columns(weight, group_size), _importance_columns(importance, group_size, len(weight))
    per_channel = weight.shape[1] // group_size
    for clip in _CLIPS:
        candidate = unclipped * clip
        trial = _Groups(grouped / candidate.repeat_interleave(per_channel), weights)
        for below in (0, 1):
            s2 = (trial.cover - below).clamp_min_(1)
            trial.consider(s2, trial.zero(s2).round_())
        total = trial.error.view(-1, per_channel).sum(1) * candidate.square()
        better = total < best
        best, scale = torch.where(better, total, best), torch.where(better, candidate, scale)
    return scale


def group_parameters(units: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """s2 (1..255) and z (0..15), float [M], of M groups of units, float [g, M]. `importance` broadcasts to `units`."""
    groups = _Groups(units, importance)
    for below in range(_S2_BELOW + 1):
        s2 = (groups.cover - below).clamp_min_(1)
        groups.consider(s2, groups.zero(s2).round_())
    s2, z = groups.s2.clone(), groups.z.clone()
    for shift in (-1, 1):
        groups.consider(s2, (z + shift).clamp_(0, _LARGEST_CODE))
    return groups.s2, groups.z


class _Groups:
    """M groups of units, float [g, M], and the best parameters and error, float [M], of all that were considered.

    A group is a column, so that each step of the search runs over contiguous memory, in one buffer that stays in cache.
    """

    def __init__(self, units: Tensor, importance: Tensor | None) -> None:
        self._units, self._importance, self._work = units, importance, torch.empty_like(units)
        # z lies in 0..15, so the 16 values of a group always hold 0.
        self._low, self._high = units.amin(0).clamp_max_(0), units.amax(0).clamp_min_(0)
        self.cover = ((self._high - self._low) / _LARGEST_CODE).ceil_().clamp_(1, 255)  # no smaller s2 clips nothing
        self.s2, self.z = self.cover.clone(), torch.zeros_like(self.cover)
        self.error = torch.full_like(self.cover, torch.inf)

    def zero(self, s2: Tensor) -> Tensor:
        """The z, not yet an integer, that centres the 16 values on the group."""
        return (_LARGEST_CODE / 2 - (self._low + self._high) / (2 * s2)).clamp_(0, _LARGEST_CODE)

    def consider(self, s2: Tensor, z: Tensor) -> None:
        low, high = _code_limits(s2, z)
        work = torch.div(self._units, s2, out=self._work)
        work.round_().clamp_(low - z, high - z).mul_(s2).sub_(self._units)
        torch.mul(work, work, out=work)
        if self._importance is not None:
            work.mul_(self._importance)
        error = work.sum(0)
        better = error < self.error
        for kept, new in ((self.error, error), (self.s2, s2), (self.z, z)):
            kept.copy_(torch.where(better, new, kept))


def encode(units: Tensor, s2: Tensor, z: Tensor) -> Tensor:
    """The nearest codes, float 0..15, whose rebuilt unit (code - z) * s2 lies in -128..127. All shapes broadcast."""
    low, high = _code_limits(s2, z)
    return ((units / s2).round_() + z).clamp(low, high)


def encode_groups(units: Tensor, group_size: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, s2 and z (uint8 [N, K], [N, G], [N, G]) of units, float [N, K]."""
    grouped = _columns(units, group_size)
    s2, z = group_parameters(grouped, _importance_columns(importance, group_size, len(units)))
    codes = encode(grouped, s2, z).T.reshape(units.shape)
    return codes.to(torch.uint8), *(part.view(len(units), -1).to(torch.uint8) for part in (s2, z))


def rebuilt(codes: Tensor, s2: Tensor, z: Tensor) -> Tensor:
    """The units (w4 - z) * s2, float [N, K], of uint8 codes [N, K] and group parameters [N, G]."""
    grouped = codes.unflatten(1, (s2.shape[1], -1)).float()
    return ((grouped - z[:, :, None].float()) * s2[:, :, None].float()).flatten(1)


def refit(weight: Tensor, units: Tensor, scale: Tensor, importance: Tensor | None = None) -> Tensor:
    """The s1, float [N], that fits scale * units to weight best (least squares); `scale` where all units are 0."""
    weighted = units if importance is None else units * importance
    norm = (weighted * units).sum(1)
    fitted = (weighted * weight).sum(1) / norm
    return torch.where((norm > 0) & (fitted > 0), fitted, scale)


def row_errors(weight: Tensor, approximation: Tensor, importance: Tensor | None = None) -> Tensor:
    """sum_k importance[k] * (weight - approximation)^2 per row, float [N]."""
    squared = (weight - approximation).square()
    return (squared if importance is None else squared * importance).sum(1)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [N, K] -> two per byte [N, K / 2], the even column in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _columns(values: Tensor, group_size: int) -> Tensor:
    """[N, K] -> [g, N * G], contiguous: each group of a row becomes a column."""
    return values.reshape(-1, group_size).T.contiguous()


def _importance_columns(importance: Tensor | None, group_size: int, rows: int) -> Tensor | None:
    return None if importance is None else _columns(importance, group_size).repeat(1, rows)


def _code_limits(s2: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The codes whose rebuilt unit fits int8."""
    low = (z - (128 / s2).floor_()).clamp_min_(0)
    return low, (z + (127 / s2).floor_()).clamp_max_(_LARGEST_CODE)
