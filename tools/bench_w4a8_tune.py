"""`kvcompile bench w4a8 --tune`: measure the tilings of the fused kernel and the rebuilt weight, and keep the fastest.

All kernels are compiled beforehand, in parallel. Each candidate is checked, then timed for a moment; the best of them
are timed again at length, beside the rebuilt weight.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from kvcompile.config import UsageError
from kvcompile.ops import launch, nvrtc, w4a8
from kvcompile.ops.w4a8 import cuda, fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.limits import Limits
from kvcompile.tools import bench_cuda, record
from kvcompile.tools import bench_w4a8_systems as systems
from kvcompile.tools.bench_w4a8_systems import Unavailable, WrongResult

_FINALISTS = 6
_FINAL_RUNS = 9
_HOPELESS = 1.15  # times the best of the short measurements: not measured again
_MOST_PROCESSES = 32
_OUT = torch.bfloat16

Cell = tuple[int, int, int, int]  # tokens, rows, columns, groups
Kernel = tuple[Path, tuple[tuple[str, int], ...]]  # source, defines


class Subject(NamedTuple):
    """One shape under measurement: copies of its packed weight, and the exact int8 weight that they stand for."""

    rows: int
    columns: int
    groups: int
    weight: w4a8.W4A8Weight
    packed: list[tuple[torch.Tensor, torch.Tensor]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tune", action="store_true", help="measure which kernel is fastest here, and write its table")
    parser.add_argument("--tune-seconds", type=float, metavar="S", help="begin no further measurement after that long")
    place = "the table's place (default: where kvcompile reads it)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=place)


def check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together or a value out of range."""
    for option in ("tune_seconds", "output"):
        if getattr(args, option) is not None and not args.tune:
            raise UsageError(f"--{option.replace('_', '-')} belongs to --tune: add that, or leave it out")
    for option in ("json", "plot"):
        if getattr(args, option) is not None and args.tune:
            raise UsageError(f"--{option} belongs to a comparison: leave out it or --tune")
    if args.tune_seconds is not None and not args.tune_seconds > 0:
        raise UsageError(f"--tune-seconds is {args.tune_seconds:g}; allowed is a number above 0")
    record.check_target("--output", args.output)


def run(args: argparse.Namespace, shapes: dict[str, tuple[int, int]], tokens: list[int], device: torch.device) -> int:
    """0 with the table written. Raises WrongResult if a kernel computes something wrong."""
    console = Console(highlight=False, soft_wrap=True)
    limits = cuda.limits(device)
    path = args.output or table.user_path(limits.name)
    _check_writable(path)
    _load_int8_product(console)
    sizes = [(rows, columns, systems.groups_of(columns)) for rows, columns in shapes.values()]
    cells = {(count, *size): candidates(limits, count, *size) for count in tokens for size in sizes}
    sound = compile_all(cells, launch.arch_of(device), console)
    subjects = {size: _subject(*size, device) for size in sizes}
    end = time.monotonic() + (args.tune_seconds or float("inf"))
    entries: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for (count, *size), tilings in cells.items():
        if time.monotonic() > end:
            console.print(f"The {args.tune_seconds:g} s are over: larger numbers of tokens are left to the estimate.")
            break
        subject = subjects[tuple(size)]
        usable = [tiling for tiling in tilings if sound[kernel_of(tiling, count, *size)]]
        tiling, us, rebuilt_us = _fastest(subject, count, usable, device, console)
        entries.setdefault(tuple(size), []).append(entry(count, tiling, us))
        chosen = "rebuilt weight" if tiling is None else " ".join(f"{k}={v}" for k, v in tiling._asdict().items())
        console.print(f"M={count} {size[0]}x{size[1]}: {us:.2f} us, {chosen} (rebuilt {rebuilt_us:.2f} us)")
    write(path, limits.name, entries)
    console.print(f"Written: {path}", markup=False)
    return 0


def _check_writable(path: Path) -> None:
    """Raise UsageError if the table could not be written, before anything is measured for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): name another place with --output") from error


def _load_int8_product(console: Console) -> None:
    """Load vLLM's int8 product, which is what a served model rebuilds weights for, or say that it is missing."""
    try:
        systems.load_cutlass()
    except Unavailable as reason:
        console.print(f"The rebuilt weight is measured with cuBLAS: {reason}.", markup=False)


def candidates(limits: Limits, tokens: int, rows: int, columns: int, groups: int) -> list[Tiling]:
    """The tilings to measure for a product: those that fit."""
    return [t for t in table.candidates(limits, tokens) if limits.plan(tokens, rows, columns, groups, t)]


def kernel_of(tiling: Tiling, tokens: int, rows: int, columns: int, groups: int) -> Kernel:
    """The source and defines that a product of this size runs."""
    return cuda.SOURCES[tiling.wgmma], tuple(sorted(fused.defines(tiling, tokens, columns, groups, 0).items()))


def compile_all(cells: dict[Cell, list[Tiling]], arch: str, console: Console) -> dict[Kernel, bool]:
    """Compile every kernel of the cells into the cache: kernel -> whether its registers hold what it computes with."""
    kernels = list(dict.fromkeys(kernel_of(tiling, *cell) for cell, tilings in cells.items() for tiling in tilings))
    start, processes = time.monotonic(), min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    # Fresh processes: NVRTC compiles one source at a time in each, and a copy of one that has used CUDA is of no use.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        sources, defines = [source for source, _ in kernels], [dict(pairs) for _, pairs in kernels]
        binaries = list(pool.map(nvrtc.compile, sources, [arch] * len(kernels), defines, chunksize=4))
    sound = {
        kernel: not any(resources.spill_store_bytes for resources in binary.resources.values())
        for kernel, binary in zip(kernels, binaries, strict=True)
    }
    console.print(
        f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s by {processes} processes; "
        f"{sum(not good for good in sound.values())} spill registers and are left out."
    )
    return sound


def _subject(rows: int, columns: int, groups: int, device: torch.device) -> Subject:
    weight = systems.make_weight(rows, columns, device)
    packed = w4a8.pack(weight)
    copies = bench_cuda.copies_of(rows * columns // 2)
    return Subject(rows, columns, groups, weight, [tuple(part.clone() for part in packed) for _ in range(copies)])


def _fastest(
    subject: Subject, tokens: int, tilings: list[Tiling], device: torch.device, console: Console
) -> tuple[Tiling | None, float, float]:
    """(the fastest way, its microseconds, those of the rebuilt weight)."""
    a = systems.make_activations(tokens, subject.columns, device)
    scales = subject.weight.channel_scales
    sums = systems.exact_sums(subject.weight, a)
    wanted = (sums.float() * a.x_scale[:, None] * scales).to(_OUT)

    def fused_call(tiling: Tiling) -> Any:
        return lambda copy: cuda.fused_linear(a.x_q, a.x_scale, *subject.packed[copy], scales, None, _OUT, tiling)

    def rebuilt_call(copy: int) -> torch.Tensor:
        return cuda.rebuilt_linear(a.x_q, a.x_scale, *subject.packed[copy], scales, None, _OUT)

    copies = len(subject.packed)
    rough: dict[Tiling, float] = {}
    refused: dict[Tiling, RuntimeError] = {}
    for tiling in tilings:
        call = fused_call(tiling)
        try:
            found = call(0)
        except RuntimeError as error:  # the driver's, of resources that no table tells beforehand
            refused[tiling] = error
            continue
        if not torch.equal(found, wanted):
            raise WrongResult(f"{tiling} at {tokens} tokens, {subject.rows} x {subject.columns}: a wrong result")
        rough[tiling] = bench_cuda.Pass(call, copies).quick()
    if refused:
        tiling, error = next(iter(refused.items()))
        console.print(f"{len(refused)} tilings refused, such as {tiling}: {error}", markup=False)
    if not bool(((rebuilt_call(0).float() - wanted.float()).abs() <= wanted.float().abs() * 2**-7).all()):
        raise WrongResult(f"the rebuilt weight at {tokens} tokens, {subject.rows} x {subject.columns}: a wrong result")
    best = sorted(rough, key=rough.__getitem__)[:_FINALISTS]
    finalists = [tiling for tiling in best if rough[tiling] <= _HOPELESS * rough[best[0]]]
    final = {tiling: _median(bench_cuda.Pass(fused_call(tiling), copies)) for tiling in finalists}
    rebuilt_us = _median(bench_cuda.Pass(rebuilt_call, copies))
    winner = min(final, key=final.__getitem__, default=None)
    if winner is None or rebuilt_us < final[winner]:
        return None, rebuilt_us, rebuilt_us
    return winner, final[winner], rebuilt_us


def _median(timed: bench_cuda.Pass) -> float:
    return sorted(timed.time(_FINAL_RUNS))[_FINAL_RUNS // 2]


def entry(tokens: int, tiling: Tiling | None, us: float) -> dict[str, Any]:
    """As the table has it."""
    return {"tokens": tokens, "tiling": None if tiling is None else tiling._asdict(), "us": round(us, 2)}


def write(path: Path, gpu: str, entries: dict[tuple[int, int, int], list[dict[str, Any]]]) -> None:
    """Write the table whole or not at all. Shapes that only the table before it has stay as they were."""
    today, versions = datetime.datetime.now(datetime.UTC).date().isoformat(), record.versions()
    measured = [
        {"rows": rows, "columns": columns, "groups": groups, "date": today, "entries": listed}
        for (rows, columns, groups), listed in entries.items()
    ]
    kept = [shape for shape in _shapes_of(path) if _size(shape) not in entries]
    head = json.dumps({"format": table.FORMAT, "gpu": gpu, "date": today, "versions": versions})
    shapes = ",\n".join(_shape_text(shape) for shape in [*measured, *kept])
    text = f'{head[:-1]}, "shapes": [\n{shapes}]}}\n'
    table.parse(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def _shapes_of(path: Path) -> list[dict[str, Any]]:
    """The shapes of a table that can be read, none otherwise: what `table` ignores is not worth keeping."""
    try:
        text = path.read_text()
        table.parse(text)
        return json.loads(text)["shapes"]
    except (FileNotFoundError, ValueError):
        return []


def _size(shape: dict[str, Any]) -> tuple[int, int, int | None]:
    return shape["rows"], shape["columns"], shape.get("groups")


def _shape_text(shape: dict[str, Any]) -> str:
    """One line for the shape and one for each entry, so that a change is seen for what it is."""
    head = json.dumps({key: value for key, value in shape.items() if key != "entries"})
    entries = ",\n".join(f"  {json.dumps(listed)}" for listed in shape["entries"])
    return f' {head[:-1]}, "entries": [\n{entries}]}}'
