"""`kvcompile bench schedule`: traces through vLLM's scheduler and kvcompile's, with a simulated worker.

Schedulers, KV cache manager and blocks are real; the worker only takes as long as a model of step times says, so that
what is compared is what was scheduled. `--engine` holds the simulation to a real engine on this machine, and on a GPU
measures real engines that schedule asynchronously.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError
from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival, StepTime
from kvcompile.tools import (
    bench_schedule_plot,
    record,
    schedule_engine,
    schedule_measured,
    schedule_overhead,
    step_times,
)
from kvcompile.tools.schedule_metrics import measures, rows_of, show
from kvcompile.tools.schedule_mixes import MIXES, read_trace

SUMMARY = "preemptions, waits and throughput of replayed traces: vLLM's scheduler and kvcompile's, worker simulated"
SYSTEMS = ("vllm-fcfs", "vllm-least-computed", "kvcompile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default, units = step_times.written(H200_LLAMA_8B), ", ".join(step_times.UNITS)
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
    parser.add_argument("--step-time", metavar="A,B,C,D", help=f"{units} (default {default}: Llama-3.1-8B on one H200)")
    parser.add_argument(
        "--overhead", action="store_true", help="also time schedule() with 100 to 10,000 waiting requests"
    )
    parser.add_argument(
        "--engine",
        metavar="MODEL",
        help="also run a small mix on a real engine with this checkpoint and, on a GPU, measure one that schedules "
        "asynchronously; without weights in the folder they are made up",
    )
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
    step_time = step_times.parse(args.step_time) if args.step_time is not None else H200_LLAMA_8B
    rows: list[dict[str, Any]] = []
    series: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for case, traces, blocks in _cases(args):
        for system in SYSTEMS:
            outcomes = [_replay(args, system, trace, blocks, step_time) for trace in traces]
            rows += rows_of(case, system, [measures(outcome) for outcome in outcomes])
            series[case, system] = outcomes[0].blocks_used
        show(f"{case}, {blocks} blocks, simulated worker", case, SYSTEMS, rows)
    if args.overhead:
        rows += schedule_overhead.measure(args.runs)
    agrees = True
    if args.engine:
        more, agrees = schedule_engine.check(args.engine)
        rows += more + schedule_measured.measure(args.engine, args.runs)
    if args.plot:
        bench_schedule_plot.write(args.plot, rows, series, SYSTEMS)
    if args.json:
        record.write(args.json, record.record("schedule", record.command(), rows))
    return 0 if agrees else 1


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
