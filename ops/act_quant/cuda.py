"""Launches of act_quant.cu, after the checks of `op.py`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kvcompile.ops import launch

SOURCE = Path(__file__).with_name("act_quant.cu")
SIGNATURES = {
    "quant_per_token": "PqiPP",
    "rms_norm_quant": "PqPfiPP",
    "fused_add_rms_norm_quant": "PqPqPfiPPP",
    "silu_mul_quant": "PqiPP",
}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
# VECTORS of act_quant.cu, and the threads that a block may then have. 0 takes rows of any width.
MAX_THREADS = {1: 512, 2: 512, 4: 1024}
# One by one, 4 vectors are 32 loads with an address each: more registers than there are.
MAX_VECTORS_UNALIGNED = 2
WIDE_THREADS = 1024
ELEMENTS = 8  # of a vector: 16 bytes
# Threads per row that are aimed at. With few rows the latency of one row counts, so many threads with little each; with
# many the bytes under way on a multiprocessor, so several rows on it at a time.
THREADS_FEW_ROWS = 512
THREADS_MANY_ROWS = 256
FEW_ROWS_PER_SM = 2


class Plan(NamedTuple):
    """How a launch splits a row: vectors of 8 elements per thread (0: loop over the row), and threads."""

    vectors: int
    threads: int


@functools.cache
def plan(width: int, aligned: bool, few_rows: bool) -> Plan:
    """The plan for rows of `width` elements."""
    total = _ceil(width, ELEMENTS)
    target = THREADS_FEW_ROWS if few_rows else THREADS_MANY_ROWS
    fitting = [
        Plan(vectors, threads)
        for vectors, allowed in MAX_THREADS.items()
        if (threads := _ceil(_ceil(total, vectors), 32) * 32) <= allowed
        and (aligned or vectors <= MAX_VECTORS_UNALIGNED)
    ]
    aimed = [it for it in fitting if it.threads <= target]
    return next(iter(aimed + fitting), Plan(0, WIDE_THREADS))


def _ceil(amount: int, size: int) -> int:
    return -(-amount // size)


def quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::quant_per_token` after its checks."""
    q, scale = _outputs(x, x.shape[1])
    _run("quant_per_token", x, x.shape[1], (x,), (x, x.stride(0), x.shape[1], q, scale))
    return q, scale


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::rms_norm_quant` after its checks."""
    q, scale = _outputs(x, x.shape[1])
    _run("rms_norm_quant", x, x.shape[1], (x, weight), (x, x.stride(0), weight, eps, x.shape[1], q, scale))
    return q, scale


def fused_add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kvcompile::fused_add_rms_norm_quant` after its checks."""
    q, scale = _outputs(x, x.shape[1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    args = (x, x.stride(0), residual, residual.stride(0), weight, eps, x.shape[1], q, scale, out)
    _run("fused_add_rms_norm_quant", x, x.shape[1], (x, residual, weight), args)
    return q, scale, out


def silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::silu_mul_quant` after its checks."""
    width = gate_up.shape[1] // 2
    q, scale = _outputs(gate_up, width)
    _run("silu_mul_quant", gate_up, width, (gate_up,), (gate_up, gate_up.stride(0), width, q, scale))
    return q, scale


def _outputs(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty((x.shape[0], width), dtype=torch.int8, device=x.device)
    return q, torch.empty((x.shape[0],), dtype=torch.float32, device=x.device)


def _run(name: str, x: torch.Tensor, width: int, inputs: tuple[torch.Tensor, ...], args: tuple) -> None:
    """Launch `name` on the rows of x. Fresh outputs are aligned if their width is, so only inputs are looked at."""
    rows, index = x.shape[0], x.get_device()
    aligned = width % ELEMENTS == 0 and all(
        tensor.data_ptr() % 16 == 0 and (tensor.dim() == 1 or tensor.stride(0) % ELEMENTS == 0) for tensor in inputs
    )
    split = plan(width, aligned, rows <= FEW_ROWS_PER_SM * _multiprocessors(index))
    kernel = _kernel(name, index, x.dtype, split.vectors, aligned)
    # The kernel waits for its predecessor before it touches memory, and lets its successor start at once.
    kernel((rows, 1, 1), split.threads, args, programmatic=True)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _kernel(name: str, index: int, dtype: torch.dtype, vectors: int, aligned: bool) -> launch.Kernel:
    defines = {"DTYPE": DTYPES[dtype], "VECTORS": vectors, "ALIGNED": int(aligned)}
    return launch.kernel(SOURCE, name, torch.device("cuda", index), defines, signature=SIGNATURES[name])
