"""What stands in a graph before it is fused: vLLM's own native norms and SwiGLU, each in front of the quantiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.ir.ops import fused_add_rms_norm, rms_norm

from kvcompile.ops.act_quant import quant_per_token

_rms_norm = rms_norm.impls["native"].impl_fn
_fused_add_rms_norm = fused_add_rms_norm.impls["native"].impl_fn


def _norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return quant_per_token(_rms_norm(x, weight, eps))


def _add_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    y, residual = _fused_add_rms_norm(x, residual, weight, eps)
    return *quant_per_token(y), residual


def _silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = gate_up.chunk(2, dim=-1)
    return quant_per_token(torch.nn.functional.silu(gate) * up)


# Name of the fused operator -> what it takes the place of, with the same arguments.
UNFUSED: dict[str, Callable[..., Any]] = {
    "rms_norm_quant": _norm_quant,
    "fused_add_rms_norm_quant": _add_norm_quant,
    "silu_mul_quant": _silu_mul_quant,
}
