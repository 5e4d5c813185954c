"""Scores that depend on positions alone: `streaming` and `random`. Any device; nothing is read but the length."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # 27 bits, so that products of 32-bit numbers stay within int64
SCORE_BITS = 24  # what fp32 holds exactly


def recency(length: int, device: torch.device) -> torch.Tensor:
    """fp32 [T]: the position."""
    return torch.arange(length, dtype=torch.float32, device=device)


def uniform(seed: int, length: int, device: torch.device) -> torch.Tensor:
    """fp32 [T] in [0, 1): a hash of (seed, T, position), equal on every device and in every version of torch."""
    # Not torch.tensor, which would wait for a GPU.
    start = _mix(_mix(torch.full((), seed, dtype=torch.int64, device=device)) + length)
    mixed = _mix(start + torch.arange(length, dtype=torch.int64, device=device))
    return (mixed >> (32 - SCORE_BITS)).float() / (1 << SCORE_BITS)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash (xor-shift and multiply, three rounds)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * _FACTOR) & _MASK
    x = ((x ^ (x >> 16)) * _FACTOR) & _MASK
    return x ^ (x >> 16)
