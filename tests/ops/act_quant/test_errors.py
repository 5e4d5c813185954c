"""Arguments that do not fit are refused by name, with what was given and what is allowed."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops import act_quant
from tests.ops.act_quant.rows import EPS

X = torch.zeros(3, 8, dtype=torch.bfloat16)
W = torch.ones(8, dtype=torch.bfloat16)

CASES = [
    ("quant_per_token", (X[0],), "x: given 1 dimensions, allowed 2"),
    ("quant_per_token", (X[None],), "x: given 3 dimensions, allowed 2"),
    (
        "quant_per_token",
        (X.int(),),
        "x: given torch.int32 on cpu, allowed torch.bfloat16, torch.float16, torch.float32",
    ),
    ("quant_per_token", (X[:, :0],), "x: given 0 channels, allowed 1 or more"),
    ("quant_per_token", (X.T.contiguous().T,), r"x: given strides \(1, 3\), allowed stride 1 in the last dimension"),
    ("rms_norm_quant", (X[:, :0], W[:0], EPS), "x: given 0 channels"),
    ("rms_norm_quant", (X, W.half(), EPS), "weight: given torch.float16, allowed the dtype of x: torch.bfloat16"),
    ("rms_norm_quant", (X, W.to("meta"), EPS), "weight: given meta, allowed the device of x: cpu"),
    ("rms_norm_quant", (X, W[:7], EPS), r"weight: given shape \(7,\), allowed one entry per channel of x: \(8,\)"),
    ("rms_norm_quant", (X, W[None], EPS), r"weight: given shape \(1, 8\)"),
    ("rms_norm_quant", (X, torch.ones(16).bfloat16()[::2], EPS), "weight: given stride 2, allowed stride 1"),
    ("rms_norm_quant", (X, W, 0.0), "eps: given 0.0, allowed a finite number above 0"),
    ("rms_norm_quant", (X, W, -1e-5), "eps: given -1e-05"),
    ("rms_norm_quant", (X, W, float("inf")), "eps: given inf"),
    ("rms_norm_quant", (X, W, float("nan")), "eps: given nan"),
    ("fused_add_rms_norm_quant", (X.int(), X, W, EPS), "x: given torch.int32"),
    (
        "fused_add_rms_norm_quant",
        (X, X[:2], W, EPS),
        r"residual: given shape \(2, 8\), allowed the shape of x: \(3, 8\)",
    ),
    ("fused_add_rms_norm_quant", (X, X.float(), W, EPS), "residual: given torch.float32"),
    ("fused_add_rms_norm_quant", (X, X.T.contiguous().T, W, EPS), r"residual: given strides \(1, 3\)"),
    ("fused_add_rms_norm_quant", (X, X, W[:1], EPS), r"weight: given shape \(1,\)"),
    ("fused_add_rms_norm_quant", (X, X, W, 0.0), "eps: given 0.0"),
    ("silu_mul_quant", (X[:, :7],), "gate_up: given 7 channels, allowed a multiple of 2"),
    ("silu_mul_quant", (X[:, :0],), "gate_up: given 0 channels, allowed a multiple of 2"),
    ("silu_mul_quant", (X.double(),), "gate_up: given torch.float64"),
]


@pytest.mark.parametrize(("op", "arguments", "words"), CASES)
def test_what_does_not_fit_is_refused(op: str, arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=f"^kvcompile::{op}: {words}"):
        getattr(act_quant, op)(*arguments)
