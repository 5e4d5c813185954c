"""Queries, keys and angles for tests of rotary embedding, and what they become."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # relative error of one rounding


class Heads(NamedTuple):
    """The arguments of `rotary`, in order."""

    query: torch.Tensor
    key: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor


def make_heads(
    tokens: int,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    rows: int = 300,
    seed: int = 0,
    around: int = 0,
) -> Heads:
    """Query and key are views of a fused qkv tensor, `around` elements wider on either side, NaN where neither is."""
    generator = torch.Generator().manual_seed(seed)
    widths = [query_heads * head_size, kv_heads * head_size]
    wide = torch.full((tokens, around + sum(widths) + kv_heads * head_size + around), float("nan"), dtype=dtype)
    query, key = wide[:, around:].split([*widths, wide.shape[1] - around - sum(widths)], 1)[:2]
    for x in (query, key):
        x.copy_(torch.randn(x.shape, generator=generator))
    angles = torch.rand((rows, head_size // 2), generator=generator) * 7
    positions = torch.randint(rows, (tokens,), generator=generator)
    return Heads(query, key, positions, torch.cat((angles.cos(), angles.sin()), 1).to(dtype))


def exact(heads: Heads) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """In float64, of query and of key: what they become, and the sum of the magnitudes of the two products."""
    head_size = heads.cos_sin_cache.shape[1]
    cos, sin = heads.cos_sin_cache.double()[heads.positions].unsqueeze(1).chunk(2, 2)
    found = []
    for x in (heads.query, heads.key):
        a, b = x.double().view(len(x), x.shape[1] // head_size, head_size).chunk(2, 2)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), 2)
        sizes = torch.cat(((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()), 2)
        found.append((turned.flatten(1), sizes.flatten(1)))
    return tuple(found)
