"""Weights of a vocabulary's head, and what its int8 product is held to."""

from __future__ import annotations

import torch

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}  # of a sum that is rounded once
_ROWS_AT_ONCE = 16384  # in float64


def head_weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 3, device: str = "cpu") -> torch.Tensor:
    """[rows, columns], rows of different size."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator, device=device)
    return (torch.randn(rows, columns, generator=generator, device=device) * sizes).to(dtype)


def assert_product(
    y: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    roundings: int = 1,
    sums: float = 2**-20,
) -> None:
    """y is (x . codes^T) * scales, rounded so often; a sum may be off by `sums` of its terms without their signs."""
    assert y.dtype == x.dtype and y.shape == (x.shape[0], codes.shape[0])
    for start in range(0, codes.shape[0], _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        rows, scale = codes[some].double(), scales[some].double()
        wanted, terms = (x.double() @ rows.t()) * scale, (x.double().abs() @ rows.abs().t()) * scale
        bound = roundings * ROUNDING[x.dtype] * wanted.abs() + sums * terms
        off = (y[:, some].double() - wanted).abs()
        assert (off <= bound).all(), (
            f"rows from {start}: off by up to {(off / bound.clamp_min(1e-300)).max():.2f} bounds"
        )
