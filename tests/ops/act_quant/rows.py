"""Rows to quantise and what must come of them, in float64 and written from the formulas alone."""

from __future__ import annotations

import torch

OPERATORS = ("quant_per_token", "rms_norm_quant", "fused_add_rms_norm_quant", "silu_mul_quant")
EPS = 1e-5


def make_rows(tokens: int, width: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Normal values, with one outlier per row that is 20 times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    if tokens:
        x[torch.arange(tokens), torch.arange(tokens) % width] *= 20
    return x.to(dtype)


def make_arguments(op: str, tokens: int, width: int, dtype: torch.dtype, *, seed: int = 0) -> tuple:
    """Positional arguments of `op` for rows that are `width` wide when quantised."""
    x = make_rows(tokens, width, dtype, seed=seed)
    weight = (torch.rand(width, generator=torch.Generator().manual_seed(seed + 1)) + 0.5).to(dtype)
    return {
        "quant_per_token": (x,),
        "rms_norm_quant": (x, weight, EPS),
        "fused_add_rms_norm_quant": (x, make_rows(tokens, width, dtype, seed=seed + 2), weight, EPS),
        "silu_mul_quant": (make_rows(tokens, 2 * width, dtype, seed=seed),),
    }[op]


def before_quantisation(op: str, *arguments) -> torch.Tensor:
    """float64 [T, K]: the row y of an operator, rounded to the dtype where the operator's docstring says "rounded"."""
    dtype = arguments[0].dtype
    if op == "quant_per_token":
        return arguments[0].double()
    if op == "silu_mul_quant":
        gate, up = arguments[0].double().chunk(2, -1)
        return _rounded(_rounded(gate / (1 + torch.exp(-gate)), dtype) * up, dtype)
    *terms, weight, eps = arguments
    x = sum(term.double() for term in terms)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return _rounded(_rounded(x, dtype) * weight.double(), dtype)


def assert_quantises(x_q: torch.Tensor, x_scale: torch.Tensor, y: torch.Tensor, *, exact: bool) -> None:
    """x_q and x_scale are those of y (float64 [T, K]); unless `exact`, one element in 1000 may be one step off."""
    assert x_q.dtype == torch.int8 and x_q.is_contiguous() and x_q.shape == y.shape
    assert x_scale.dtype == torch.float32 and x_scale.is_contiguous() and x_scale.shape == y.shape[:1]
    amax = y.abs().amax(-1).clamp_min(1e-18)
    # Of 16-bit rows: their greatest element is off by one rounding of 16 bits, if it is off.
    torch.testing.assert_close(x_scale.double(), amax / 127, rtol=2e-7 if exact else 2**-7, atol=0)
    steps = y * 127 / amax[:, None]
    # A value halfway between two steps may go either way by what fp32 rounds off.
    off = (x_q.double() - steps).abs()
    assert off.max() <= (0.5 + 1e-4 if exact else 1.5)
    wrong = int((off > 0.5 + 1e-4).sum())
    assert wrong <= y.numel() / 1000, f"{wrong} of {y.numel()} elements are a step off"


def _rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y.to(dtype).double()
