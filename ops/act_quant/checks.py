"""What the operators of this folder accept. Every failure names the argument, what was given and what is allowed."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

DTYPES = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}


def check_rows(op: str, name: str, x: torch.Tensor, multiple: int = 1) -> None:
    """[T, width], width a positive multiple of `multiple`, of a dtype that the device has, neighbours side by side."""
    if x.dim() != 2:
        fail(op, name, f"{x.dim()} dimensions", "2: [tokens, channels]")
    allowed = DTYPES[x.device.type]
    if x.dtype not in allowed:
        fail(op, name, f"{x.dtype} on {x.device}", ", ".join(map(str, allowed)))
    if x.shape[1] < 1 or x.shape[1] % multiple:
        fail(op, name, f"{x.shape[1]} channels", f"a multiple of {multiple}" if multiple > 1 else "1 or more")
    if x.stride(1) != 1 and x.shape[1] > 1:
        fail(op, name, f"strides {x.stride()}", "stride 1 in the last dimension")


def check_weight(op: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """[K] of what x is."""
    check_same_kind(op, "weight", weight, x)
    if weight.shape != x.shape[1:]:
        fail(op, "weight", f"shape {tuple(weight.shape)}", f"one entry per channel of x: ({x.shape[1]},)")
    if not weight.is_contiguous():
        fail(op, "weight", f"stride {weight.stride(0)}", "stride 1")


def check_residual(op: str, residual: torch.Tensor, x: torch.Tensor) -> None:
    """[T, K] of what x is."""
    check_same_kind(op, "residual", residual, x)
    if residual.shape != x.shape:
        fail(op, "residual", f"shape {tuple(residual.shape)}", f"the shape of x: {tuple(x.shape)}")
    check_rows(op, "residual", residual)


def check_same_kind(op: str, name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """The dtype and device of x. Needs no sizes: usable while tracing."""
    if tensor.dtype != x.dtype:
        fail(op, name, tensor.dtype, f"the dtype of x: {x.dtype}")
    if tensor.device != x.device:
        fail(op, name, tensor.device, f"the device of x: {x.device}")


def check_eps(op: str, eps: float) -> None:
    """Above 0: a row of zeros would be normalised to NaN."""
    if not 0 < eps < math.inf:
        fail(op, "eps", eps, "a finite number above 0")


def fail(op: str, argument: str, given: Any, allowed: Any) -> NoReturn:
    raise ValueError(f"kvcompile::{op}: {argument}: given {given}, allowed {allowed}")
