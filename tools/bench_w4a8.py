"""`kvcompile bench w4a8`: the W4A8 linear against what else multiplies by such weights, on the same tensors in one run.

A timed call finds its weight in device memory, never in a cache, and follows the one before it in a CUDA graph, as in a
decode step. The floor is the time that the 4-bit weight takes at the speed of a copy on this GPU, or the product at the
nominal int8 rate of its tensor cores, whichever is more.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import cuda, estimate
from kvcompile.ops.w4a8.limits import Limits
from kvcompile.ops.w4a8.reference import CHANNEL_STEP
from kvcompile.ops.w4a8.table import MEASURED_TOKENS
from kvcompile.tools import bench_cuda, bench_plot, bench_w4a8_tune, record
from kvcompile.tools import bench_w4a8_systems as systems
from kvcompile.tools.bench_w4a8_systems import SYSTEMS, Unavailable, WrongResult, packed_bytes

SUMMARY = "time of one linear layer: W4A8 against bf16, int8 and another W4A8 library; --tune measures tilings"
PRESETS = {"llama-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}}
TOKENS = (1, 32, 4096)
SUM = "layer_sum"
_MEMORY_BOUND_TOKENS = 256  # up to here GB/s say more than TOPS


class Result(NamedTuple):
    """Microseconds of each run by (tokens, shape, system), why systems are missing, and the ceiling measured."""

    times: dict[tuple[int, str, str], list[float]]
    missing: dict[str, str]
    copy_rates: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", default="llama-8b", help="llama-8b (default), or NxK[,NxK...]: output by input channels"
    )
    parser.add_argument("--tokens", help="comma-separated (default 1,32,4096; with --tune 1,8,16,32,64,128,256,512)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per system (default 7)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"comma-separated (default {','.join(SYSTEMS)})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it there; an .svg")
    bench_w4a8_tune.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a result is wrong."""
    shapes = _shapes(args.shapes)
    tokens = _tokens(args.tokens) if args.tokens else list(MEASURED_TOKENS if args.tune else TOKENS)
    _check_options(args)
    device = bench_cuda.device()
    try:
        if args.tune:
            return bench_w4a8_tune.run(args, shapes, tokens, device)
        result = measure(shapes, tokens, args.systems.split(","), args.runs, device)
    except WrongResult as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    limits = cuda.limits(device)
    floors = _floors(result, shapes, limits)
    _print(result, floors, shapes, limits)
    rows = _rows(result, floors)
    if args.json:
        record.write(args.json, record.record("w4a8", record.command(), rows, ["humming-kernels"]))
    if args.plot:
        bench_plot.write(args.plot, f"W4A8 linear, {limits.name}", rows, list(SYSTEMS), "floor")
    return 0


def measure(
    shapes: dict[str, tuple[int, int]], tokens: list[int], names: list[str], runs: int, device: torch.device
) -> Result:
    """Check, then time, every system on every shape. Raises WrongResult."""
    result = Result({}, {}, list(bench_cuda.copy_rates(runs)))
    with contextlib.suppress(Unavailable):
        systems.load_cutlass()  # before the operator first looks for it
    for shape, (rows, columns) in shapes.items():
        weight = systems.make_weight(rows, columns, device)
        copies = bench_cuda.copies_of(rows * columns // 2)
        inputs = {count: systems.make_activations(count, columns, device) for count in tokens}
        for name in names:
            if name in result.missing:
                continue
            try:
                call = SYSTEMS[name].prepare(weight, copies)
                for count, activations in inputs.items():
                    systems.check(name, SYSTEMS[name], call, weight, activations)
                    timed = bench_cuda.Pass(lambda copy, call=call, a=activations: call(copy, a), copies)
                    result.times[count, shape, name] = timed.time(runs)
                    del timed
            except Unavailable as reason:
                result.missing[name] = str(reason)
            except Exception as error:
                if not SYSTEMS[name].guarded:
                    raise
                first_line = (str(error).strip() or "no message").splitlines()[0]
                result.missing[name] = f"{type(error).__name__}: {first_line}"
            call = None
            torch.cuda.empty_cache()
    _add_sums(result, shapes)
    return result


def _add_sums(result: Result, shapes: dict[str, tuple[int, int]]) -> None:
    """The sum over the shapes, run by run, for each system that has them all."""
    for tokens, name in dict.fromkeys((tokens, name) for tokens, _, name in result.times):
        parts = [result.times.get((tokens, shape, name)) for shape in shapes]
        if len(parts) > 1 and all(parts):
            result.times[tokens, SUM, name] = [sum(run) for run in zip(*parts, strict=True)]


def _floors(result: Result, shapes: dict[str, tuple[int, int]], limits: Limits) -> dict[tuple[int, str], list[float]]:
    """Microseconds by (tokens, shape), in the order to show them, one value for each copy rate measured."""
    floors = {}
    cases = {(tokens, shape) for tokens, shape, _ in result.times}
    for tokens, shape in sorted(cases, key=lambda case: (case[0], [*shapes, SUM].index(case[1]))):
        parts = shapes.values() if shape == SUM else [shapes[shape]]
        rates = result.copy_rates
        floors[tokens, shape] = [sum(floor(tokens, *part, rate, limits) for part in parts) for rate in rates]
    return floors


def floor(tokens: int, rows: int, columns: int, copy_rate: float, limits: Limits) -> float:
    """Microseconds that a product takes at least. copy_rate: GB/s."""
    read = packed_bytes(rows, columns, systems.groups_of(columns)) / copy_rate / 1e3
    return max(read, 2e6 * tokens * rows * columns / estimate.int8_rate(limits))


def _shapes(text: str) -> dict[str, tuple[int, int]]:
    if text in PRESETS:
        return PRESETS[text]
    shapes = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", part)
        if not match or not int(match[1]) or not int(match[2]) or int(match[2]) % CHANNEL_STEP:
            allowed = f"{', '.join(PRESETS)}, or output by input channels such as 4096x14336, the latter a multiple of"
            raise UsageError(f"--shapes has {part!r}; allowed is {allowed} {CHANNEL_STEP}")
        shapes[part] = (int(match[1]), int(match[2]))
    return shapes


def _tokens(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--tokens is {text!r}; allowed are whole numbers above 0, separated by commas")
    return sorted({int(part) for part in parts})


def _check_options(args: argparse.Namespace) -> None:
    if args.runs < 1:
        raise UsageError(f"--runs is {args.runs}; allowed is 1 or more")
    for name in args.systems.split(","):
        if name not in SYSTEMS:
            raise UsageError(f"--systems has {name!r}; allowed are {', '.join(SYSTEMS)}")
    record.check_target("--json", args.json)
    record.check_target("--plot", args.plot)
    if args.plot and args.plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot {args.plot}: it draws SVG alone; end the name in .svg")
    bench_w4a8_tune.check_options(args)


def _rows(result: Result, floors: dict[tuple[int, str], list[float]]) -> list[dict[str, Any]]:
    """The record's rows: times, the floor of each case, and the copy that it is computed from."""
    rows = [record.row("copy of 1 GiB", "copy", "bandwidth", "GB/s", result.copy_rates)]
    for (tokens, shape), values in floors.items():
        case = f"M={tokens} {shape}"
        for name in SYSTEMS:
            if times := result.times.get((tokens, shape, name)):
                rows.append(record.row(case, name, "time", "us", times))
        rows.append(record.row(case, "floor", "time", "us", values))
    return rows


def _print(
    result: Result,
    floors: dict[tuple[int, str], list[float]],
    shapes: dict[str, tuple[int, int]],
    limits: Limits,
) -> None:
    medians = {key: record.row("", "", "", "", values) for key, values in result.times.items()}
    copy = record.row("", "", "", "", result.copy_rates)
    table = Table(title=f"W4A8 linear on {limits.name}: median (min to max)", title_justify="left")
    for column in ("case", "system", "us", "speed", "of bf16", "of floor"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right", no_wrap=True)
    for (tokens, shape), floor_us in floors.items():
        table.add_section()
        parts = list(shapes.values()) if shape == SUM else [shapes[shape]]
        for name, system in SYSTEMS.items():
            time = medians.get((tokens, shape, name))
            if time is None:
                continue
            us = time["median"]
            if tokens <= _MEMORY_BOUND_TOKENS:
                read = sum(system.weight_bytes(n, k, systems.groups_of(k)) for n, k in parts)
                speed = f"{read / us / 1e3:.0f} GB/s"
            else:
                speed = f"{sum(2 * tokens * n * k for n, k in parts) / us / 1e6:.0f} TOPS"
            bf16 = medians.get((tokens, shape, "cublas-bf16"))
            table.add_row(
                f"M={tokens} {shape}",
                name,
                f"{us:.2f} ({time['min']:.2f} to {time['max']:.2f})",
                speed,
                f"{bf16['median'] / us:.2f}x" if bf16 else "",
                f"{sorted(floor_us)[len(floor_us) // 2] / us:.0%}",
            )
    console = record.console()
    console.print(table)
    for name, reason in result.missing.items():
        console.print(f"{name}: not measured: {reason}", markup=False)
    console.print(
        f"Copy of 1 GiB: {copy['median']:.0f} GB/s ({copy['min']:.0f} to {copy['max']:.0f}). "
        f"Nominal int8 rate: {estimate.int8_rate(limits) / 1e12:.0f} TOPS. Speed counts a system's own weight."
    )
