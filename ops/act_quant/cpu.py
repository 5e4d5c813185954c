"""The CPU implementation in plain torch; step for step what the CUDA kernels compute, so also their reference.

Statistics and quotients are fp32. `y` is rounded to the dtype of the input where vLLM's own operators round it, so that
quantising what they return gives the same: after the normalisation and after the weight, after silu and after `up`.
"""

from __future__ import annotations

import torch

QUANT_MAX = 127
# An all-zero row needs a divisor. Far below any activation, and 127 over it is far from overflow.
AMAX_FLOOR = 1e-18


def quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::quant_per_token` after its checks."""
    y = x.float()
    amax = y.abs().amax(-1, keepdim=True).clamp_min_(AMAX_FLOOR)
    # Not `QUANT_MAX / amax`, which torch computes as reciprocal times 127, with two roundings.
    inverse = torch.full_like(amax, QUANT_MAX).div_(amax)
    # The only products that are not finite are NaN: inf * 0, and all of a row with a NaN.
    q = y.mul(inverse).round_().nan_to_num_(nan=0.0)
    return q.to(torch.int8), (amax / QUANT_MAX).squeeze(-1)


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::rms_norm_quant` after its checks."""
    return quant_per_token(_rms_norm(x.float(), weight, eps))


def fused_add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kvcompile::fused_add_rms_norm_quant` after its checks."""
    total = x.float() + residual.float()
    return *quant_per_token(_rms_norm(total, weight, eps)), total.to(x.dtype)


def silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::silu_mul_quant` after its checks."""
    gate, up = gate_up.chunk(2, -1)
    return quant_per_token(torch.nn.functional.silu(gate) * up)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 [T, K] to the dtype of `weight` [K]."""
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * factor).to(weight.dtype) * weight
