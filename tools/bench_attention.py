"""`kvcompile bench attention`: KV8 attention against flash attention over a bf16 cache and vLLM's own int8 kernels.

Decode: one new token a row; of a pruned request we are given its whole table, the others what it has kept. Prefill: one
row of new tokens, alone or behind a context that the cache holds. Every system stores the new tokens, then attends, as
one CUDA graph over rotated caches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.ops.kv8 import HEAD_SIZES
from kvcompile.tools import bench_cuda, record
from kvcompile.tools.bench_attention_batch import BLOCK_SIZE, Batch, make_batch
from kvcompile.tools.bench_attention_systems import SYSTEMS
from kvcompile.tools.bench_w4a8_systems import Unavailable, WrongResult

SUMMARY = "time of attention over the int8 cache, against flash attention over a bf16 cache and vLLM's int8 kernels"
_PREFILL_CALLS = 2  # in a graph: a prompt is long enough that its own launch does not count
# Of outputs, in norm: what quantising keys and values of normal values costs, and what computing costs.
_QUANTISATION, _ROUNDING = 0.03, 0.01


class Case(NamedTuple):
    """`rows` of `context` tokens in the cache and `new` ones, behind `released` tokens that were pruned."""

    kind: str
    rows: int
    context: int
    new: int
    released: int = 0

    @property
    def name(self) -> str:
        if self.kind == "decode":
            held = self.context + 1
            return f"decode {self.rows}x" + (f"{self.released + held} pruned to {held}" if self.released else f"{held}")
        return f"prefill {self.new}" + (f"+{self.context}" if self.context else "")


CASES = (
    *(Case("decode", rows, length - 1, 1) for rows, length in ((32, 1024), (32, 4096), (32, 16384), (8, 65536))),
    *(Case("decode", rows, length - 1, 1) for rows, length in ((1, 262144), (64, 544), (256, 544))),
    # The rows of one of these in the tables of longer requests: what a decode reads once those are pruned.
    Case("decode", 64, 543, 1, released=16384 - 544),
    *(Case("prefill", 1, context, new) for context, new in ((0, 4096), (0, 16384), (12288, 4096), (61440, 4096))),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-size", type=int, default=128, help=f"one of {', '.join(map(str, HEAD_SIZES))}")
    parser.add_argument("--kind", choices=("decode", "prefill"), help="only these cases (default: both)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per system (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a result is wrong."""
    for name in ("heads", "kv_heads", "runs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is 1 or more")
    if args.heads % args.kv_heads:
        raise UsageError(f"--heads is {args.heads}; allowed are multiples of --kv-heads, {args.kv_heads}")
    if args.head_size not in HEAD_SIZES:
        raise UsageError(f"--head-size is {args.head_size}; allowed are {', '.join(map(str, HEAD_SIZES))}")
    record.check_target("--json", args.json)
    device = bench_cuda.device()
    try:
        rows, missing = measure(args, device)
    except WrongResult as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    ceiling = bench_cuda.copy_rates(args.runs)
    rows.append(record.row("copy of 1 GiB", "copy", "bandwidth", "GB/s", ceiling))
    _print(rows, missing)
    if args.json:
        record.write(args.json, record.record("attention", record.command(), rows))
    return 0


def measure(args: argparse.Namespace, device: torch.device) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the record's rows, systems that are missing and why). Raises WrongResult."""
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for case in CASES:
        if args.kind in (None, case.kind):
            heads = args.heads, args.kv_heads, args.head_size
            batch = make_batch(case.rows, case.context, case.new, *heads, device, case.released // BLOCK_SIZE)
            rows += _measure(case, batch, args.runs, missing)
            del batch
            torch.cuda.empty_cache()
    return rows, missing


def _measure(case: Case, batch: Batch, runs: int, missing: dict[str, str]) -> list[dict[str, Any]]:
    rows, outputs = [], {}
    for name, make in SYSTEMS.items():
        tokens = case.rows * (case.context + case.new)
        try:
            first = make(batch)
        except Unavailable as reason:
            missing[name] = str(reason)
            continue
        first()
        outputs[first.label] = batch.output.double()
        size = tokens * batch.new_key.shape[1] * first.bytes_per_token
        copies = bench_cuda.copies_of(size) if case.kind == "decode" else _PREFILL_CALLS
        systems = [first, *(make(batch) for _ in range(copies - 1))]
        times = bench_cuda.Pass(lambda i, s=systems: s[i](), copies).time(runs)
        rows.append(record.row(case.name, first.label, "time", "us", times))
        if case.kind == "decode":
            rows.append(record.row(case.name, first.label, "bandwidth", "GB/s", [size / t / 1e3 for t in times]))
        else:
            heads, head_size = batch.query.shape[1:]
            operations = 4 * heads * head_size * case.new * (case.context + (case.new + 1) / 2)
            rows.append(record.row(case.name, first.label, "compute", "TFLOP/s", [operations / t / 1e6 for t in times]))
        del systems, first
    _check(case, outputs)
    return rows


def _check(case: Case, outputs: dict[str, torch.Tensor]) -> None:
    """Raise WrongResult unless all systems computed the same, but for quantisation and rounding."""
    for name, output in outputs.items():
        for other, theirs in outputs.items():
            # Prompts without context are not quantised by ours, but are by vLLM's.
            allowed = _QUANTISATION if {name, other} != {"kvcompile", "triton-int8"} or case.new > 1 else _ROUNDING
            error = ((output - theirs).norm() / theirs.norm()).item()
            if not error <= allowed:
                raise WrongResult(f"{case.name}: {name} is {error:.3f} from {other}, allowed is {allowed}")


def _print(rows: list[dict[str, Any]], missing: dict[str, str]) -> None:
    times = {(r["case"], r["system"]): r for r in rows if r["metric"] == "time"}
    rates = {(r["case"], r["system"]): r for r in rows if r["metric"] != "time"}
    table = Table(title=f"Attention, pages of {BLOCK_SIZE}: median (min to max)", title_justify="left")
    for column in ("case", "system", "us", "rate", "same tokens", "same bytes"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right", no_wrap=True)
    last = dict(times.keys())  # the system that comes last in each case
    flash = {case: system for case, system in times if system.startswith("fa")}
    for (case, system), row in times.items():
        span = f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f})"
        rate, shares = rates[case, system], ["", ""]
        if case in flash:
            base = case, flash[case]
            shares[0] = f"{times[base]['median'] / row['median']:.2f}x"
            if rate["metric"] == "bandwidth":
                shares[1] = f"{rate['median'] / rates[base]['median']:.2f}x"
        shown = f"{rate['median']:.0f} {rate['unit']}"
        table.add_row(case, system, span, shown, *shares, end_section=system == last[case])
    console = record.console()
    console.print(table)
    for name, why in missing.items():
        console.print(f"{name}: not measured: {why}", markup=False)
    copy = rates["copy of 1 GiB", "copy"]
    said = f"Copy of 1 GiB: {copy['median']:.0f} GB/s ({copy['min']:.0f} to {copy['max']:.0f})."
    console.print(f"{said} Speed against flash attention over a bf16 cache.", markup=False)
