"""The operators `kvcompile::quant_per_token` and its fused forms: schemas, fakes, checks and their Python names.

T tokens, K channels. All give x_q int8 [T, K], contiguous, and x_scale fp32 [T] with y ~ x_q * x_scale, where y is the
row before quantisation:

    a = max(max|y|, 1e-18)      x_scale = a / 127      x_q = round_half_even(y * (127 / a))         all in fp32

A row of zeros gives zeros. A row that holds a NaN gives x_scale NaN, one that holds an infinity and no NaN x_scale inf,
both with x_q 0: what is computed from it is not finite. Inputs are bf16 or fp16, on a CPU also fp32; rows may be any
distance apart (views of a wider tensor), elements of a row are neighbours. T may be 0.

The same formulas run on every device. `quant_per_token` agrees bit for bit; in the others the order of a sum, or the
exponential function, may differ in the last bit of fp32, which moves few elements by one step.
"""

from __future__ import annotations

from types import ModuleType

import torch

from kvcompile.ops.act_quant import checks, cpu, cuda
from kvcompile.ops.library import register


def quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_q, x_scale) of x [T, K]: y = x. Raises ValueError naming the argument that does not fit."""
    return torch.ops.kvcompile.quant_per_token(x)


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_q, x_scale) of the RMS norm of x [T, K]: y = round(x / sqrt(mean(x^2) + eps)) * weight, rounded again.

    weight: [K] of x's dtype. "Rounded" is to x's dtype, from fp32: where vLLM's `rms_norm` rounds.
    Raises ValueError naming the argument that does not fit.
    """
    return torch.ops.kvcompile.rms_norm_quant(x, weight, eps)


def fused_add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x_q, x_scale, residual_out): `rms_norm_quant` of s = x + residual, and s rounded to x's dtype.

    x, residual: [T, K] of one dtype. The norm sees s in fp32, before that rounding, as in vLLM's `fused_add_rms_norm`.
    Raises ValueError naming the argument that does not fit.
    """
    return torch.ops.kvcompile.fused_add_rms_norm_quant(x, residual, weight, eps)


def silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_q, x_scale) of SwiGLU: y = round(silu(gate)) * up, rounded again, with gate_up [T, 2K] = [gate | up].

    silu(v) = v / (1 + exp(-v)) in fp32; "rounded" is to the dtype of gate_up, as vLLM's `silu_and_mul` does.
    Raises ValueError naming the argument that does not fit.
    """
    return torch.ops.kvcompile.silu_mul_quant(gate_up)


def _implementation(x: torch.Tensor) -> ModuleType:
    return cuda if x.is_cuda else cpu


def _quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_rows("quant_per_token", "x", x)
    return _implementation(x).quant_per_token(x)


def _quant_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(x, x.shape[1])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    op = "rms_norm_quant"
    checks.check_rows(op, "x", x)
    checks.check_weight(op, weight, x)
    checks.check_eps(op, eps)
    return _implementation(x).rms_norm_quant(x, weight, eps)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_same_kind("rms_norm_quant", "weight", weight, x)
    return _outputs(x, x.shape[1])


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = "fused_add_rms_norm_quant"
    checks.check_rows(op, "x", x)
    checks.check_residual(op, residual, x)
    checks.check_weight(op, weight, x)
    checks.check_eps(op, eps)
    return _implementation(x).fused_add_rms_norm_quant(x, residual, weight, eps)


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    checks.check_same_kind("fused_add_rms_norm_quant", "residual", residual, x)
    checks.check_same_kind("fused_add_rms_norm_quant", "weight", weight, x)
    return *_outputs(x, x.shape[1]), x.new_empty(x.shape)


def _silu_mul(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_rows("silu_mul_quant", "gate_up", gate_up, multiple=2)
    return _implementation(gate_up).silu_mul_quant(gate_up)


def _silu_mul_fake(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(gate_up, gate_up.shape[1] // 2)


def _outputs(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((x.shape[0], width), dtype=torch.int8), x.new_empty((x.shape[0],), dtype=torch.float32)


register("quant_per_token(Tensor x) -> (Tensor, Tensor)", fake=_quant_fake, CPU=_quant, CUDA=_quant)
register(
    "rms_norm_quant(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=_rms_norm_fake,
    CPU=_rms_norm,
    CUDA=_rms_norm,
)
register(
    "fused_add_rms_norm_quant(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    fake=_add_rms_norm_fake,
    CPU=_add_rms_norm,
    CUDA=_add_rms_norm,
)
register("silu_mul_quant(Tensor gate_up) -> (Tensor, Tensor)", fake=_silu_mul_fake, CPU=_silu_mul, CUDA=_silu_mul)
