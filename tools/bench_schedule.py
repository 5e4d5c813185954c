"""`kvcompile bench schedule`: traces through vLLM's scheduler and kvcompile's, with a simulated worker.

Schedulers, KV cache manager and blocks are real; the worker only takes as long as a model of step times says, so that
what is compared is what was scheduled. `--engine` holds the simulation to a real engine on this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcompile.config import UsageError, shown
from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival, StepTime
from kvcompile.tools import bench_schedule_plot, record, schedule_engine, schedule_overhead
from kvcompile.tools.schedule_metrics import METRICS, rows_of
from kvcompile.tools.schedule_mixes import MIXES, read_trace

SUMMARY = "preemptions, waits and throughput of replayed traces: vLLM's scheduler and kvcompile's, worker simulated"
SYSTEMS = ("vllm-fcfs", "vllm-least-computed", "kvcompile")
_STEP_TIME = ("ms a step", "us a prompt token", "us a decoding request", "ns a token of context")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ",".join(f"{value:g}" for value in _units(H200_LLAMA_8B))
    parser.add_argument("--mix", action="append", choices=tuple(MIXES), help="a generated mix (default: all)")
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="replay this file instead: arrival_s, prompt_tokens, ..."
    )
    parser.add_argument("--requests", type=int, default=600, help="requests of a generated mix (default 600)")
    parser.add_argument("--runs", type=int, default=3, help="seeds per generated mix (default 3)")
    parser.add_argument("--blocks", type=int, help="blocks of 16 tokens in the pool (default: as the mix says; 6000)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests running together (default 256)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens of a step (default 8192)")
    parser.add_argument("--synchronous", action="store_true", help="without asynchronous scheduling")
    parser.add_argument(
        "--step-time", metavar="A,B,C,D", help=f"{', '.join(_STEP_TIME)} (default {default}: Llama-3.1-8B on one H200)"
    )
    parser.add_argument(
        "--overhead", action="store_true", help="also time schedule() with 100 to 10,000 waiting requests"
    )
    parser.add_argument("--engine", metavar="MODEL", help="also run a small mix on a real engine with this checkpoint")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw preemptions, waits and blocks over time (SVG)"
    )


def run(args: argparse.Namespace) -> int:
    """0 with tables on standard output; 1 if the real engine did not schedule as the simulation says."""
    for name in ("requests", "runs", "blocks", "max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; allowed is 1 or more")
    if args.trace and args.mix:
        raise UsageError("--trace and --mix are both given; keep one of the two")
    record.check_target("--json", args.json)
    record.check_target("--plot", args.plot)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it reports every configuration that it builds
    step_time = _step_time(args.step_time)
    rows: list[dict[str, Any]] = []
    series: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for case, traces, blocks in _cases(args):
        for system in SYSTEMS:
            outcomes = [_replay(args, system, trace, blocks, step_time) for trace in traces]
            rows += rows_of(case, system, outcomes)
            series[case, system] = outcomes[0].blocks_used
        _print(case, blocks, rows)
    if args.overhead:
        rows += schedule_overhead.measure(args.runs)
    agrees = True
    if args.engine:
        more, agrees = schedule_engine.check(args.engine)
        rows += more
    if args.plot:
        bench_schedule_plot.write(args.plot, rows, series, SYSTEMS)
    if args.json:
        record.write(args.json, record.record("schedule", record.command(), rows))
    return 0 if agrees else 1


def _step_time(text: str | None) -> StepTime:
    if text is None:
        return H200_LLAMA_8B
    try:
        base, prefill, decode, context = (float(part) for part in text.split(","))
    except ValueError:
        base = prefill = decode = context = -1.0
    if not (base > 0 and prefill >= 0 and decode >= 0 and context >= 0):
        raise UsageError(f"--step-time is {shown(text)}; allowed are four numbers: {', '.join(_STEP_TIME)}")
    return StepTime(base * 1e-3, prefill * 1e-6, decode * 1e-6, context * 1e-9)


def _units(time: StepTime) -> tuple[float, float, float, float]:
    return (
        time.base_s * 1e3,
        time.per_prefill_token_s * 1e6,
        time.per_decode_request_s * 1e6,
        time.per_context_token_s * 1e9,
    )


def _cases(args: argparse.Namespace) -> list[tuple[str, list[list[Arrival]], int]]:
    """Name, traces (one per run) and blocks of what is replayed."""
    if args.trace:
        return [(args.trace.stem, [read_trace(args.trace)], args.blocks or 6000)]
    return [
        (name, [MIXES[name].trace(args.requests, seed) for seed in range(args.runs)], args.blocks or MIXES[name].blocks)
        for name in args.mix or MIXES
    ]


def _replay(args: argparse.Namespace, system: str, trace: Sequence[Arrival], blocks: int, step_time: StepTime) -> Any:
    from kvcompile.integrations.vllm import replay_systems

    longest = max(arrival.prompt_tokens + arrival.max_tokens for arrival in trace)
    if -(-longest // 16) > blocks - 1:
        raise UsageError(
            f"a request of {longest} tokens needs {-(-longest // 16)} blocks, the pool has {blocks - 1} (one is vLLM's "
            "own); give more --blocks"
        )
    return replay_systems.replay(
        system,
        trace,
        blocks,
        step_time,
        asynchronous=not args.synchronous,
        max_model_len=longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def _print(case: str, blocks: int, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{case}, {blocks} blocks, simulated worker: median (min to max)", title_justify="left")
    table.add_column("")
    for system in SYSTEMS:
        table.add_column(system, justify="right")
    by = {(row["metric"], row["system"]): row for row in rows if row["case"] == case}
    for metric, unit, heading, digits in METRICS:
        found = (by[metric, system] for system in SYSTEMS)
        spread = (f"{r['median']:,.{digits}f} ({r['min']:,.{digits}f} to {r['max']:,.{digits}f})" for r in found)
        table.add_row(f"{heading}, {unit}", *spread)
    record.console().print(table)
