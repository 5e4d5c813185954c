"""`kvcompile bench offload`: how fast pages of the int8 cache go to pinned host memory and come back.

Pages of all layers of a model of `--layers` go from blocks to slots and back, neither in order, one way at a time and
both ways at once; times are those of a caller who waits, from the order to the end. Shares are of what plain copies of
1 GiB reach in the same run. Beside that: how much longer two kinds of work take on the compute stream meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.ops.block_copy.cuda import THREAD_BLOCKS, BlockCopy
from kvcompile.ops.kv8 import HEAD_SIZES, kv8_decode, kv_cache_shape, plan_decode
from kvcompile.tools import bench_cuda, record
from kvcompile.tools.bench_offload_systems import LINK_BYTES, SYSTEMS, KVCompile, Link, System
from kvcompile.tools.bench_w4a8_systems import Unavailable, WrongResult

SUMMARY = "speed of copying pages of the int8 cache to host memory and back, and what it costs work beside it"
PAGES = (64, 256, 1024)
BLOCK_SIZE = 16
WAYS = ("store", "load", "both")
_MATMUL, _DECODE_ROWS, _DECODE_TOKENS = 4096, 32, 4096
# Of the time of a store, that the work beside it takes: it must not go on when the store has ended.
_WORK_SHARE = 0.5
_QUICK_RUNS = 3  # of `Pass.quick`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-size", type=int, default=128, help=f"one of {', '.join(map(str, HEAD_SIZES))}")
    parser.add_argument("--pages", type=int, nargs="+", default=list(PAGES), metavar="N", help="pages of a batch")
    parser.add_argument(
        "--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help=f"default {' '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--thread-blocks",
        type=int,
        nargs="+",
        default=[THREAD_BLOCKS],
        metavar="B",
        help=f"of our kernel (default {THREAD_BLOCKS})",
    )
    parser.add_argument("--runs", type=int, default=7, help="timed runs per case (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a page is not what it was."""
    for name in ("layers", "kv_heads", "runs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is 1 or more")
    for name in ("pages", "thread_blocks"):
        if min(getattr(args, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} has {min(getattr(args, name))}; allowed is 1 or more")
    if args.head_size not in HEAD_SIZES:
        raise UsageError(f"--head-size is {args.head_size}; allowed are {', '.join(map(str, HEAD_SIZES))}")
    record.check_target("--json", args.json)
    device = bench_cuda.device()
    missing: dict[str, str] = {}
    try:
        rows = measure(args, device, missing)
    except WrongResult as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    _print(rows, missing)
    if args.json:
        record.write(args.json, record.record("offload", record.command(), rows))
    return 0


def measure(args: argparse.Namespace, device: torch.device, missing: dict[str, str]) -> list[dict[str, Any]]:
    """The record's rows; notes in `missing` the systems that this machine has not, and why. Raises WrongResult."""
    link = _link(device, args.runs)
    rows = [record.row(f"{way} 1 GiB", "copy", "bandwidth", "GB/s", rates) for way, rates in link.items()]
    most = {way: statistics.median(rates) for way, rates in link.items()}
    caches = _caches(args, device)
    for name in dict.fromkeys(args.systems):
        makers: dict[str, Callable[..., System]] = {name: SYSTEMS[name]}
        if name == "kvcompile":
            copies = {blocks: partial(BlockCopy, thread_blocks=blocks) for blocks in args.thread_blocks}
            makers = {_label(blocks): partial(KVCompile, make=make) for blocks, make in copies.items()}
        for label, make in makers.items():
            try:
                system = make(caches, caches[0].shape[0])
            except Unavailable as error:
                missing[label] = str(error)
                continue
            _check(label, system, caches)
            for pages in sorted(set(args.pages)):
                rows += _measure(label, system, pages, caches, most, args.runs)
            rows += _beside(label, system, caches, args, device)
            del system
    return rows


def _label(thread_blocks: int) -> str:
    return "kvcompile" if thread_blocks == THREAD_BLOCKS else f"kvcompile/{thread_blocks}-blocks"


def _caches(args: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Of all layers, of twice as many blocks as the largest batch has pages. Raises UsageError if they do not fit."""
    blocks = 2 * max(args.pages)
    shape = kv_cache_shape(blocks, BLOCK_SIZE, args.kv_heads, args.head_size)
    try:
        return [torch.randint(-128, 128, shape, dtype=torch.int8, device=device) for _ in range(args.layers)]
    except torch.OutOfMemoryError as error:
        raise UsageError(f"--pages has {max(args.pages)}: {blocks} blocks do not fit the device; give less") from error


def _link(device: torch.device, runs: int) -> dict[str, list[float]]:
    """GB/s of plain copies, by way; both ways together count both."""
    link = Link(device)

    def both() -> None:
        link.store()
        link.load()

    calls = {"store": link.store, "load": link.load, "both": both}
    size = {"store": LINK_BYTES, "load": LINK_BYTES, "both": 2 * LINK_BYTES}
    return {way: [size[way] / seconds / 1e9 for seconds in _seconds(call, runs)] for way, call in calls.items()}


def _seconds(call: Callable[[], object], runs: int) -> list[float]:
    """Of each run, from the call until the device has nothing more to do; after one that is not counted."""
    found = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[1:]


def _numbers(count: int, begin: int, end: int) -> list[int]:
    """So many of [begin, end), in no order."""
    return (torch.randperm(end - begin)[:count] + begin).tolist()


def _measure(
    label: str, system: System, pages: int, caches: Sequence[torch.Tensor], most: dict[str, float], runs: int
) -> list[dict[str, Any]]:
    half, size = caches[0].shape[0] // 2, pages * sum(cache[0].nbytes for cache in caches)
    blocks, slots = _numbers(pages, 0, half), _numbers(pages, 0, half)
    others, their_slots = _numbers(pages, half, 2 * half), _numbers(pages, half, 2 * half)

    def store() -> None:
        system.start_store(blocks, slots)

    def load() -> None:
        system.start_load(their_slots, others)

    def both() -> None:
        store()
        load()

    rows = []
    for way, call, moved in (("store", store, size), ("load", load, size), ("both", both, 2 * size)):
        seconds = _seconds(call, runs)
        rates = [moved / each / 1e9 for each in seconds]
        case = f"{way} {pages}"
        rows.append(record.row(case, label, "time", "us", [1e6 * each for each in seconds]))
        rows.append(record.row(case, label, "bandwidth", "GB/s", rates))
        rows.append(record.row(case, label, "share_of_link", "%", [100 * rate / most[way] for rate in rates]))
    return rows


def _check(label: str, system: System, caches: Sequence[torch.Tensor]) -> None:
    """Raise WrongResult unless pages come and go bit for bit. Leaves every slot of the pool written."""
    blocks = caches[0].shape[0]
    slots = _numbers(blocks, 0, blocks)
    system.start_store(range(blocks), slots)
    torch.cuda.synchronize()
    some = {0, blocks // 2, blocks - 1}
    wanted = {block: torch.cat([cache[block].flatten().view(torch.uint8) for cache in caches]) for block in some}
    for block in some:
        if not torch.equal(system.row(slots[block]), wanted[block].cpu()):
            raise WrongResult(f"{label}: a page that was stored is another in the pool")
    for cache in caches:
        cache[list(some)] = 0
    system.start_load([slots[block] for block in some], list(some))
    torch.cuda.synchronize()
    for block in some:
        if not torch.equal(torch.cat([cache[block].flatten().view(torch.uint8) for cache in caches]), wanted[block]):
            raise WrongResult(f"{label}: a page that was loaded is not what was stored")


def _beside(
    label: str, system: System, caches: Sequence[torch.Tensor], args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """By how much longer work takes while pages are copied: all of them, so that copying lasts longer than the work."""
    blocks = caches[0].shape[0]
    numbers = _numbers(blocks, 0, blocks)
    copies = {
        "store": lambda: system.start_store(range(blocks), numbers),
        "load": lambda: system.start_load(numbers, range(blocks)),
    }
    rows = []
    for way, copy in copies.items():
        lasts_us = 1e6 * min(_seconds(copy, _QUICK_RUNS))
        for work, call in (("matmul", _matmul(device)), ("decode", _decode(args, device))):
            once_us = bench_cuda.Pass(call, 1).quick()
            calls = max(1, int(_WORK_SHARE * lasts_us / _QUICK_RUNS / once_us))
            work_pass = bench_cuda.Pass(call, calls)
            slower = []
            for _ in range(args.runs):
                alone = work_pass.quick()
                copy()
                slower.append(100 * (work_pass.quick() / alone - 1))
            rows.append(record.row(f"{work} beside {way}", label, "slowdown", "%", slower))
    return rows


def _matmul(device: torch.device) -> Callable[[int], object]:
    left, right = (torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return lambda _: torch.mm(left, right, out=out)


def _decode(args: argparse.Namespace, device: torch.device) -> Callable[[int], object]:
    """A layer's attention of a full batch, over a cache of its own."""
    columns = _DECODE_TOKENS // BLOCK_SIZE
    shape = kv_cache_shape(_DECODE_ROWS * columns, BLOCK_SIZE, args.kv_heads, args.head_size)
    cache = torch.zeros(shape, dtype=torch.int8, device=device)
    table = torch.randperm(_DECODE_ROWS * columns, device=device).int().view(_DECODE_ROWS, columns)
    lens = torch.full((_DECODE_ROWS,), _DECODE_TOKENS, dtype=torch.int32, device=device)
    query = torch.randn(_DECODE_ROWS, 4 * args.kv_heads, args.head_size, dtype=torch.bfloat16, device=device)
    output, plan = torch.empty_like(query), plan_decode(table, lens, BLOCK_SIZE)
    return lambda _: kv8_decode(query, cache, table, lens, output, args.head_size**-0.5, plan)


def _print(rows: list[dict[str, Any]], missing: dict[str, str]) -> None:
    console = record.console()
    table = Table(title="To host memory and back: GB/s, median (min to max)", title_justify="left")
    for column in ("pages", "system", "GB/s", "of the link"):
        table.add_column(column, justify="left" if column in ("pages", "system") else "right", no_wrap=True)
    shares = {(row["case"], row["system"]): row for row in rows if row["metric"] == "share_of_link"}
    for row in rows:
        if row["metric"] == "bandwidth":
            share = shares.get((row["case"], row["system"]))
            rate = f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f})"
            table.add_row(row["case"], row["system"], rate, f"{share['median']:.0f} %" if share else "")
    console.print(table)
    beside = Table(title="Work takes longer beside them by: %, median (min to max)", title_justify="left")
    for column in ("work", "system", "%"):
        beside.add_column(column, justify="right" if column == "%" else "left", no_wrap=True)
    for row in rows:
        if row["metric"] == "slowdown":
            slower = f"{row['median']:.1f} ({row['min']:.1f} to {row['max']:.1f})"
            beside.add_row(row["case"], row["system"], slower)
    console.print(beside)
    for label, why in missing.items():
        console.print(f"{label}: not measured: {why}", markup=False)
