"""`kvcompile bench prune`: what pruning a prompt costs one layer: scores, selection, and the move of the kept tokens.

Times are of one layer of a model of `--layers`: its layers are scored one after the other, each from a cache of its
own, and selected and moved together at the end, as a prompt is (whose layers select in parts where more than 64 MiB of
scores would wait). `kvcompile` is all of it, `kvcompile/score` and so on a part. They are replays of CUDA graphs: what
launching costs the host is not in them. With `--prefill`, a stock vLLM engine computes prompts of the same lengths
first, and the pruning of all layers is said as a share of that.
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
from kvcompile.ops.kv8 import HEAD_SIZES, kv8_store, kv_cache_shape
from kvcompile.ops.prune import METHODS, Method, parse_method, prune_compact, prune_score, select, select_layers
from kvcompile.tools import bench_cuda, bench_prefill, record
from kvcompile.tools.bench_w4a8_systems import WrongResult

SUMMARY = "time of pruning a prompt in the int8 cache: scores, selection and compaction, for one layer"
TOKENS = (4096, 16384, 65536)
BUDGET = 544  # tokens, beside half of the prompt
BLOCK_SIZE = 16
PARTS = ("kvcompile/score", "kvcompile/select", "kvcompile/compact", "kvcompile")
_CHECKED_TOKENS = 1024
_ROUNDING = 5e-3  # of the largest score: products are in fp16


class Layer(NamedTuple):
    """One layer's observation queries [W, H, d], its cache, and the tokens that it keeps, once they are selected."""

    query: torch.Tensor
    cache: torch.Tensor
    keep: torch.Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-size", type=int, default=128, help=f"one of {', '.join(map(str, HEAD_SIZES))}")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default 32)")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="T", help="of the prompts")
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS), default=["andpro", "robust"], help="default andpro robust"
    )
    parser.add_argument("--runs", type=int, default=7, help="timed runs per part (default 7)")
    parser.add_argument(
        "--prefill", metavar="MODEL", help="also say the share of a prefill by stock vLLM: a folder or a shape's name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a result is wrong."""
    for name in ("heads", "kv_heads", "layers", "runs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is 1 or more")
    if args.heads % args.kv_heads:
        raise UsageError(f"--heads is {args.heads}; allowed are multiples of --kv-heads, {args.kv_heads}")
    if args.head_size not in HEAD_SIZES:
        raise UsageError(f"--head-size is {args.head_size}; allowed are {', '.join(map(str, HEAD_SIZES))}")
    if "critical" in args.methods:
        raise UsageError("--methods has critical, which needs a model's output projection; allowed are the others")
    least = BUDGET + BLOCK_SIZE
    if min(args.tokens) < least:
        raise UsageError(f"--tokens has {min(args.tokens)}; allowed is {least} or more: {BUDGET} of them are kept")
    record.check_target("--json", args.json)
    device = bench_cuda.device()
    shape = bench_prefill.Shape(args.layers, args.heads, args.kv_heads, args.head_size)
    prefill = bench_prefill.first_token_us(args.prefill, shape, args.tokens, args.runs) if args.prefill else {}
    try:
        rows = measure(args, device, prefill)
    except WrongResult as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    rows.append(record.row("copy of 1 GiB", "copy", "bandwidth", "GB/s", bench_cuda.copy_rates(args.runs)))
    _print(rows)
    if args.json:
        record.write(args.json, record.record("prune", record.command(), rows))
    return 0


def measure(args: argparse.Namespace, device: torch.device, prefill: dict[int, list[float]]) -> list[dict[str, Any]]:
    """The record's rows. prefill: us to the first token, by length. Raises WrongResult."""
    rows = [record.row(f"prefill {tokens}", "vllm", "ttft", "us", times) for tokens, times in prefill.items()]
    methods = [parse_method(name) for name in args.methods]
    for tokens in sorted(set(args.tokens)):
        for method in methods:
            for budget in sorted({tokens // 2, BUDGET}, reverse=True):
                rows += _measure(method, tokens, budget, args, device, prefill.get(tokens))
    return rows


def _measure(
    method: Method,
    tokens: int,
    budget: int,
    args: argparse.Namespace,
    device: torch.device,
    prefill: list[float] | None,
) -> list[dict[str, Any]]:
    first = (tokens - budget) // BLOCK_SIZE * BLOCK_SIZE
    kept = tokens - first
    columns = -(-tokens // BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(tokens)
    row = torch.randperm(columns, generator=generator, device=device).int()
    layers = [_layer(method, tokens, kept, columns, args, generator) for _ in range(args.layers)]
    scale = args.head_size**-0.5

    def score(layer: Layer) -> torch.Tensor:
        return prune_score(layer.query, layer.cache, row, tokens, scale, method)

    def compact() -> None:
        prune_compact([layer.cache for layer in layers], row, [layer.keep for layer in layers], tokens, first)

    def all_of_it() -> None:
        keeps = select_layers([score(layer) for layer in layers], method, kept)
        prune_compact([layer.cache for layer in layers], row, keeps, tokens, first)

    _check(method, layers[0], row, scale)
    scores = [score(layer) for layer in layers]
    for layer, keep in zip(layers, select_layers(scores, method, kept), strict=True):
        layer.keep.copy_(keep)
    count = args.layers

    def together(call: Callable[[], object]) -> list[float]:
        return [t / count for t in bench_cuda.Pass(lambda _: call(), 1).time(args.runs)]

    times = {
        "kvcompile/score": bench_cuda.Pass(lambda i: score(layers[i]), count).time(args.runs),
        "kvcompile/select": together(lambda: select_layers(scores, method, kept)),
        "kvcompile/compact": together(compact),
        "kvcompile": together(all_of_it),
    }
    case = f"{method.NAME} {tokens}->{kept}"
    moved = 2 * 2 * kept * args.kv_heads * layers[0].cache.shape[-1]  # read and written, keys and values
    rates = [moved / t / 1e3 for t in times["kvcompile/compact"]]
    shares = bench_prefill.shares(times["kvcompile"], count, prefill) if prefill else []
    return [
        *(record.row(case, part, "time", "us", times[part]) for part in PARTS),
        record.row(case, "kvcompile/compact", "bandwidth", "GB/s", rates),
        *([record.row(case, "kvcompile", "share of prefill", "%", shares)] if shares else []),
    ]


def _layer(
    method: Method, tokens: int, kept: int, columns: int, args: argparse.Namespace, generator: torch.Generator
) -> Layer:
    """Normal values, in a cache of which every page is the prompt's."""
    device = generator.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    cache = torch.empty(
        kv_cache_shape(columns, BLOCK_SIZE, args.kv_heads, args.head_size), dtype=torch.int8, device=device
    )
    slots = torch.arange(columns * BLOCK_SIZE, device=device)
    kv8_store(*(draw(len(slots), args.kv_heads, args.head_size) for _ in range(2)), cache, slots)
    keep = torch.empty(args.kv_heads, kept, dtype=torch.int32, device=device)
    return Layer(draw(method.window, args.heads, args.head_size), cache, keep)


def _check(method: Method, layer: Layer, row: torch.Tensor, scale: float) -> None:
    """Raise WrongResult unless the first tokens, as a prompt of their own, are scored and selected as on a CPU."""
    length = min(_CHECKED_TOKENS, row.shape[0] * BLOCK_SIZE)
    found = prune_score(layer.query, layer.cache, row, length, scale, method)
    expected = prune_score(layer.query.cpu(), layer.cache.cpu(), row.cpu(), length, scale, method)
    for ours, theirs in zip(found.cpu(), expected, strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not error <= _ROUNDING:
            raise WrongResult(f"{method.NAME}: scores are {error:.1e} from those of the CPU, allowed is {_ROUNDING}")
    keep = select(found, method, length // 2).cpu()
    if not torch.equal(keep, select(found.cpu(), method, length // 2)):
        raise WrongResult(f"{method.NAME}: the tokens selected are not those that a CPU selects by the same scores")


def _print(rows: list[dict[str, Any]]) -> None:
    times = {(row["case"], row["system"]): row for row in rows if row["metric"] == "time"}
    table = Table(title="Pruning, a layer: us, median (min to max)", title_justify="left")
    for column in ("method, tokens", *(part.removeprefix("kvcompile/") for part in PARTS[:-1]), "all"):
        table.add_column(column, justify="left" if column == "method, tokens" else "right", no_wrap=True)
    for case in dict.fromkeys(case for case, _ in times):
        parts = [times[case, part] for part in PARTS]
        table.add_row(case, *(f"{r['median']:.1f} ({r['min']:.1f} to {r['max']:.1f})" for r in parts))
    console = record.console()
    console.print(table)
    for row in rows:
        spread = f"{row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})"
        if row["metric"] == "share of prefill":
            console.print(f"{row['case']}: {spread} % of the prefill, all layers.", markup=False)
        elif row["metric"] == "ttft":
            console.print(f"{row['case']}, stock vLLM: {spread} us to the first token.", markup=False)
    copy = rows[-1]
    said = f"Copy of 1 GiB: {copy['median']:.0f} GB/s ({copy['min']:.0f} to {copy['max']:.0f})."
    console.print(said, markup=False)
