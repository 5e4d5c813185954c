"""`kvcompile bench act-quant`: the operators that quantise activations, beside a copy of as many bytes and vLLM's own.

`vllm-bf16` is the norm or activation function alone, which leaves bf16: what the fused operator takes the place of. Few
tokens are found in the L2 cache, where the layer before left them; thousands of them are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.ops import act_quant
from kvcompile.tools import bench_cuda, record
from kvcompile.tools.bench_w4a8_systems import Unavailable, WrongResult, load_cutlass

SUMMARY = "time of quantising activations to int8, alone and fused with norm and SwiGLU, against a copy"
TOKENS = (32, 4096)
SYSTEMS = ("kvcompile", "vllm-bf16", "copy")
_EPS = 1e-5
_FEWEST_CALLS = 64  # in a graph, so that its own launch does not count
_SHARE_OF_L2 = 4  # operands of up to a quarter of it stay there from call to call

Operands = tuple[torch.Tensor, ...]


class Operator(NamedTuple):
    """One operator: its operands for T rows, how it is called, and vLLM's without quantisation if there is one.

    vllm(operands, weight, out, ops) writes its result to out, [T, K] bf16. moved: bytes read and written per element.
    """

    operands: Callable[[int, int, int], list[tuple[int, int]]]
    width: Callable[[int, int], int]
    ours: Callable[[Operands, torch.Tensor], tuple[torch.Tensor, ...]]
    vllm: Callable[[Operands, torch.Tensor, torch.Tensor, Any], object] | None
    moved: int


OPERATORS = {
    "quant_per_token": Operator(
        lambda t, hidden, _: [(t, hidden)],
        lambda hidden, _: hidden,
        lambda x, w: act_quant.quant_per_token(*x),
        None,
        3,
    ),
    "rms_norm_quant": Operator(
        lambda t, hidden, _: [(t, hidden)],
        lambda hidden, _: hidden,
        lambda x, w: act_quant.rms_norm_quant(*x, w, _EPS),
        lambda x, w, out, ops: ops.rms_norm(out, *x, w, _EPS),
        3,
    ),
    "fused_add_rms_norm_quant": Operator(
        lambda t, hidden, _: [(t, hidden)] * 2,
        lambda hidden, _: hidden,
        lambda x, w: act_quant.fused_add_rms_norm_quant(*x, w, _EPS),
        lambda x, w, out, ops: ops.fused_add_rms_norm(*x, w, _EPS),  # in place
        7,
    ),
    "silu_mul_quant": Operator(
        lambda t, _, intermediate: [(t, 2 * intermediate)],
        lambda _, intermediate: intermediate,
        lambda x, w: act_quant.silu_mul_quant(*x),
        lambda x, w, out, ops: ops.silu_and_mul(out, *x),
        5,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=4096, help="width of the model (default 4096)")
    parser.add_argument("--intermediate", type=int, default=14336, help="width of its MLP (default 14336)")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="T", help="default 32 4096")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per system (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a result is wrong."""
    for name, values in (("tokens", args.tokens), ("runs", [args.runs])):
        if min(values) < 1:
            raise UsageError(f"--{name} has {min(values)}; allowed is 1 or more")
    for name in ("hidden", "intermediate"):
        if getattr(args, name) < 8 or getattr(args, name) % 8:
            raise UsageError(f"--{name} is {getattr(args, name)}; allowed are multiples of 8")
    record.check_target("--json", args.json)
    device = bench_cuda.device()
    try:
        rows, missing = measure(args, device)
    except WrongResult as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    _print(rows, missing)
    if args.json:
        record.write(args.json, record.record("act_quant", record.command(), rows))
    return 0


def measure(args: argparse.Namespace, device: torch.device) -> tuple[list[dict[str, Any]], str | None]:
    """(the record's rows, why vLLM's operators are missing or None). Raises WrongResult."""
    ops, missing = None, None
    try:
        load_cutlass()
        ops = torch.ops._C
    except Unavailable as reason:
        missing = str(reason)
    rows = []
    for tokens in sorted(set(args.tokens)):
        for name, operator in OPERATORS.items():
            sizes = operator.operands(tokens, args.hidden, args.intermediate)
            width = operator.width(args.hidden, args.intermediate)
            weight = torch.rand(width, device=device).bfloat16() + 0.5
            out = torch.empty(tokens, width, device=device, dtype=torch.bfloat16)
            rotated = [tuple(_make(size, device) for size in sizes) for _ in range(_copies(sizes))]
            _check(name, operator, rotated[0], weight)
            half = operator.moved * tokens * width // 2
            copied = [torch.zeros(2, half, dtype=torch.uint8, device=device) for _ in rotated]
            calls: dict[str, Callable[[int], object]] = {
                "kvcompile": lambda i, o=operator, r=rotated, w=weight: o.ours(r[i], w),
                "copy": lambda i, c=copied: c[i][1].copy_(c[i][0]),
            }
            if ops and operator.vllm:
                calls["vllm-bf16"] = lambda i, o=operator, r=rotated, w=weight, y=out: o.vllm(r[i], w, y, ops)
            for system in SYSTEMS:
                if system in calls:
                    times = _time(calls[system], len(rotated), args.runs)
                    rows.append(record.row(f"T={tokens} {name}", system, "time", "us", times))
    return rows, missing


def _time(call: Callable[[int], object], copies: int, runs: int) -> list[float]:
    return bench_cuda.Pass(lambda i: call(i % copies), max(copies, _FEWEST_CALLS)).time(runs)


def _make(size: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(size, device=device).bfloat16()


def _copies(sizes: list[tuple[int, int]]) -> int:
    size = sum(2 * rows * columns for rows, columns in sizes)
    return 2 if size * _SHARE_OF_L2 <= bench_cuda.l2_bytes() else bench_cuda.copies_of(size)


def _check(name: str, operator: Operator, operands: Operands, weight: torch.Tensor) -> None:
    """Raise WrongResult unless the first rows are those of the CPU: one element in 1000 may be a step off."""
    some = tuple(part[:32].cpu() for part in operands)
    wanted, wanted_scale, *_ = operator.ours(some, weight.cpu())
    found, scale = (part[:32].cpu() for part in operator.ours(operands, weight)[:2])
    off = (found.int() - wanted.int()).abs()
    if off.max() > 1 or off.sum() > off.numel() / 1000 or not torch.allclose(scale, wanted_scale, rtol=2**-7):
        raise WrongResult(f"{name}: {int((off > 0).sum())} of {off.numel()} elements differ, by up to {int(off.max())}")


def _print(rows: list[dict[str, Any]], missing: str | None) -> None:
    times = {(row["case"], row["system"]): row for row in rows}
    table = Table(title="Activation quantisation: median (min to max)", title_justify="left")
    for column in ("case", "system", "us", "of copy"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right", no_wrap=True)
    for (case, system), row in times.items():
        share = times[case, "copy"]["median"] / row["median"]
        span = f"{row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})"
        table.add_row(case, system, span, "" if system == "copy" else f"{share:.0%}", end_section=system == "copy")
    console = record.console()
    console.print(table)
    if missing:
        console.print(f"vllm-bf16: not measured: {missing}", markup=False)
