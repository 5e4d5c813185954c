"""Builders for the tests of the W4A8 operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.ops.w4a8 import W4A8Weight, pack, quantize


class Packed(NamedTuple):
    """A random weight, quantised, in the layout of a checkpoint and in that of the kernels."""

    plain: W4A8Weight
    tiles: torch.Tensor
    group_params: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tiles, group_params, channel_scales, as the operator takes them."""
        return self.tiles, self.group_params, self.plain.channel_scales

    def cuda(self) -> Packed:
        return Packed(W4A8Weight(*(part.cuda() for part in self.plain)), self.tiles.cuda(), self.group_params.cuda())


def make_weight(rows: int, columns: int, group: int, seed: int = 0) -> Packed:
    """Normal weights with some outliers, so that groups differ in range and some are one-sided."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[:, ::37] *= 6
    weight[::3, : group // 2] += 2
    plain = quantize(weight, group)
    return Packed(plain, *pack(plain))


def make_activations(tokens: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_q, x_scale): int8 over its whole range with both ends in it, and positive fp32 scales."""
    generator = torch.Generator().manual_seed(seed)
    x_q = torch.randint(-127, 128, (tokens, columns), dtype=torch.int8, generator=generator)
    if tokens:
        x_q[0, :2] = torch.tensor([-127, 127])
    return x_q, torch.rand(tokens, generator=generator) + 1e-3


def naive_rebuild(weight: W4A8Weight) -> torch.Tensor:
    """(w4 - z) * s2, int64 [N, K], one element at a time from the definition of the checkpoint layout."""
    rows, columns = weight.qweight.shape[0], weight.qweight.shape[1] * 2
    group = columns // weight.group_scales.shape[1]
    out = torch.zeros(rows, columns, dtype=torch.int64)
    for n in range(rows):
        for k in range(columns):
            byte = int(weight.qweight[n, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            j = k // group
            out[n, k] = (code - int(weight.group_zeros[n, j])) * int(weight.group_scales[n, j])
    return out
