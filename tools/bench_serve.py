"""`kvcompile bench serve`: output tokens a second of a served model, stock vLLM beside kvcompile, at equal KV memory.

Every system serves the same requests, all sent at once, on the same GPU: each case goes round the systems, run by run.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.presets import NAME
from kvcompile.tools import bench_cuda, engine_process, model_shapes, record
from kvcompile.tools.serve_engine import Served

SUMMARY = "output tokens a second of a served model: stock vLLM and kvcompile at equal KV memory"
GRID = "512:512,4096:512,16000:512,512:2048,4096:2048,16000:2048"


class System(NamedTuple):
    """Fields of LLM, and what the engine has to say of itself."""

    arguments: dict[str, Any]
    expected: dict[str, Any]


def _ours(*parts: str) -> dict[str, Any]:
    """The preset with these parts alone."""
    options = {part: {"enabled": part in parts} for part in ("kv8", "linear", "scheduler")}
    return {"compilation_config": NAME, "additional_config": {NAME: {"strict": True, **options}}}


_INT8 = {"dtype": "int8_per_token_head", "graphs": "FULL_AND_PIECEWISE"}
SYSTEMS = {
    "vllm-bf16": System({}, {"dtype": "auto", "graphs": "FULL_AND_PIECEWISE"}),
    "vllm-int8": System(
        {"kv_cache_dtype": "int8_per_token_head", "attention_backend": "TRITON_ATTN"},
        {**_INT8, "backend": "TRITON_ATTN"},
    ),
    "kvcompile/kv8": System(_ours("kv8"), {**_INT8, "backend": "CUSTOM"}),
    "kvcompile": System({"compilation_config": NAME}, {**_INT8, "backend": "CUSTOM"}),
}


class Case(NamedTuple):
    """Tokens of a prompt and of an answer."""

    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}->{self.output}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"checkpoint folder, or one of {', '.join(model_shapes.SHAPES)}")
    parser.add_argument(
        "--systems", default="vllm-bf16,kvcompile/kv8", help=f"of {','.join(SYSTEMS)} (default vllm-bf16,kvcompile/kv8)"
    )
    parser.add_argument("--grid", default=GRID, metavar="PROMPT:OUTPUT,...", help=f"default {GRID}")
    parser.add_argument("--requests", type=int, default=32, help="sent at once (default 32)")
    parser.add_argument("--kv-gib", type=float, default=26.0, help="KV cache of each system (default 26)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests running together (default 64)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of a case (default 3)")
    parser.add_argument("--together", action="store_true", help="start all engines at once; the GPU has to hold them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output. Raises UsageError if a system did not start as it should."""
    for name in ("requests", "runs", "max_num_seqs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is 1 or more")
    if not args.kv_gib > 0:
        raise UsageError(f"--kv-gib is {args.kv_gib}; allowed is more than 0")
    cases, names = grid(args.grid), systems(args.systems)
    record.check_target("--json", args.json)
    bench_cuda.device()
    with tempfile.TemporaryDirectory(prefix="kvcompile-serve-") as scratch:
        model = model_shapes.folder_of(args.model, Path(scratch))
        rows = measure(args, model, cases, names, Path(scratch))
    _print(args, rows, names)
    if args.json:
        record.write(args.json, record.record("serve", record.command(), rows))
    return 0


def grid(text: str) -> list[Case]:
    """The cases of --grid. Raises UsageError."""
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*(,[1-9]\d*:[1-9]\d*)*", text):
        raise UsageError(f"--grid is {text!r}; allowed are PROMPT:OUTPUT pairs of tokens, as in 512:512,4096:128")
    return [Case(*map(int, pair.split(":"))) for pair in text.split(",")]


def systems(text: str) -> list[str]:
    """The names of --systems. Raises UsageError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise UsageError(f"--systems has {', '.join(map(repr, unknown))}; allowed are {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(names))


def measure(
    args: argparse.Namespace, model: Path, cases: list[Case], names: list[str], scratch: Path
) -> list[dict[str, Any]]:
    """The record's rows. Raises UsageError if an engine ends, or is not what its system says."""
    arguments = _arguments(args, model, cases)
    rows: list[dict[str, Any]] = []
    for group in [names] if args.together else [[name] for name in names]:
        with ExitStack() as stack:
            engines = []
            for name in group:
                given = {**arguments, **SYSTEMS[name].arguments}
                engine = Served(name, model, given, scratch / f"{name.replace('/', '-')}.log")
                stack.callback(engine.close)
                engines.append(engine)
            for engine in engines:
                facts = engine.facts()
                _check(engine.name, facts)
                rows.append(record.row("KV cache", engine.name, "blocks", "blocks of 16 tokens", [facts["blocks"]]))
            for case in cases:
                for engine in engines:  # compiles and loads what the first prompts of a length need
                    engine.run(case.prompt, 2, min(args.requests, 4), 1000)
                found: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
                for seed in range(args.runs):
                    for engine in engines:
                        found[engine.name].append(engine.run(*case, args.requests, seed))
                for name, runs in found.items():
                    rows += _rows(case, name, runs, args.requests)
    return rows


def _arguments(args: argparse.Namespace, model: Path, cases: list[Case]) -> dict[str, Any]:
    """Of LLM, for all systems."""
    return {
        **engine_process.model_arguments(model),
        "max_model_len": max(case.prompt + case.output for case in cases),
        "max_num_seqs": args.max_num_seqs,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
        "enable_prefix_caching": False,
    }


def _check(name: str, facts: dict[str, Any]) -> None:
    """Raise UsageError unless the engine runs as its system is meant to."""
    for key, value in {"block_size": 16, "asynchronous": True, **SYSTEMS[name].expected}.items():
        if facts[key] != value:
            raise UsageError(f"{name}: {key} is {facts[key]} and not {value}: it would not be what is to be compared")


def _rows(case: Case, name: str, runs: list[dict[str, Any]], requests: int) -> list[dict[str, Any]]:
    tokens = requests * case.output
    figures = {
        ("output_throughput", "output tokens/s"): [tokens / run["seconds"] for run in runs],
        ("ttft_mean", "s"): [sum(run["ttft"]) / requests for run in runs],
        ("ttft_worst", "s"): [max(run["ttft"]) for run in runs],
        ("tpot_mean", "ms"): [1e3 * sum(run["tpot"]) / requests for run in runs],
        ("preemptions", "requests"): [run["preemptions"] for run in runs],
    }
    return [record.row(str(case), name, metric, unit, values) for (metric, unit), values in figures.items()]


def _print(args: argparse.Namespace, rows: list[dict[str, Any]], names: list[str]) -> None:
    by = {(row["case"], row["system"], row["metric"]): row for row in rows}
    title = f"{args.model}, {args.requests} requests at once, {args.kv_gib:g} GiB of KV: median (min to max)"
    table = Table(title=title, title_justify="left")
    for column in ("case", "system", "output tokens/s", f"of {names[0]}", "TTFT s", "TPOT ms", "preempted"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right", no_wrap=True)
    for case in dict.fromkeys(row["case"] for row in rows if row["metric"] == "output_throughput"):
        for name in names:
            rate, base = by[case, name, "output_throughput"], by[case, names[0], "output_throughput"]
            span = f"{rate['median']:.0f} ({rate['min']:.0f} to {rate['max']:.0f})"
            others = (f"{by[case, name, m]['median']:.4g}" for m in ("ttft_mean", "tpot_mean", "preemptions"))
            share = f"{rate['median'] / base['median']:.2f}x"
            table.add_row(case, name, span, share, *others, end_section=name == names[-1])
    console = record.console()
    console.print(table)
    blocks = ", ".join(f"{name} {by['KV cache', name, 'blocks']['median']:,}" for name in names)
    console.print(f"Blocks of 16 tokens: {blocks}.", markup=False)
