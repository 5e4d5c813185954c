"""`kvcompile bench host`: vLLM's own time in a decode step, in which a GPU has nothing to do.

Everywhere: `schedule()` and `update_from_output()` of a full batch that decodes, with a simulated worker, in processor
time. On a GPU also: a whole step of real engines of one layer, whose model takes less than the host's part of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.presets import NAME
from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival
from kvcompile.tools import engine_process, model_shapes, record
from kvcompile.tools.serve_engine import Served

SUMMARY = "host time of a decode step: the scheduler alone, and on a GPU whole steps of engines of one layer"
_SCHEDULERS = ("vllm-fcfs", "kvcompile")
# Of whole engines: whether kvcompile is asked for, and which model runner takes the steps.
_ENGINES = {
    "vllm-v1": (False, "0"),
    "vllm-v2": (False, "1"),
    "kvcompile": (True, "0"),
    "kvcompile/v2": (True, "1"),
}
_SHAPE = model_shapes.SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 1}
_STEPS, _SKIPPED = 300, 50  # of a scheduler
_PROMPT, _OUTPUT = 32, 257  # tokens of a request of an engine


class _Enough(Exception):
    """So many steps were timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, action="append", help="requests that decode (default: 1, 32 and 128)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs (default 5)")
    parser.add_argument("--system", action="append", choices=tuple(_ENGINES), help="of the engines (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output."""
    batches = list(dict.fromkeys(args.batch or (1, 32, 128)))
    if min(batches) < 1 or max(batches) > 1024:
        raise UsageError(f"--batch is {args.batch}; allowed is 1 to 1024")
    if args.runs < 1:
        raise UsageError(f"--runs is {args.runs}; allowed is 1 or more")
    record.check_target("--json", args.json)
    gpu = record.gpu()
    if args.system and gpu is None:
        raise UsageError("--system names engines, which are timed on a GPU alone; there is none, so leave it out")
    rows = [row for batch in batches for row in _scheduler_rows(batch, args.runs)]
    if gpu is not None:
        rows += _engine_rows(list(dict.fromkeys(args.system or _ENGINES)), batches, args.runs)
    _print(rows)
    if args.json:
        record.write(args.json, record.record("host", record.command(), rows))
    return 0


def _scheduler_rows(batch: int, runs: int) -> list[dict[str, Any]]:
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        for system in _SCHEDULERS:
            for metric, microseconds in _scheduler_us(system, batch).items():
                values.setdefault((system, metric), []).append(microseconds)
    return [record.row(f"decode {batch}", system, metric, "us", given) for (system, metric), given in values.items()]


def _scheduler_us(system: str, batch: int) -> dict[str, float]:
    """Medians over the steps of a batch that decodes."""
    from kvcompile.integrations.vllm.replay import Replay
    from kvcompile.integrations.vllm.replay_systems import scheduler_for

    scheduler, config = scheduler_for(
        system, 100_000, asynchronous=True, max_model_len=16384, max_num_seqs=batch, max_num_batched_tokens=8192
    )
    spent: dict[str, list[float]] = {"schedule_time": [], "update_time": []}
    for metric, name in zip(spent, ("schedule", "update_from_output"), strict=True):
        setattr(scheduler, name, _timed(getattr(scheduler, name), spent[metric]))

    def stop(replay: Replay) -> None:
        if replay.outcome.steps >= _STEPS:
            raise _Enough

    replay = Replay(scheduler, config, H200_LLAMA_8B, after_step=stop)
    try:
        replay.run([Arrival(0.0, 256, 2 * _STEPS, 2 * _STEPS) for _ in range(batch)])
    except _Enough:
        return {metric: statistics.median(times[_SKIPPED:]) for metric, times in spent.items()}
    raise RuntimeError(f"the trace ended after {replay.outcome.steps} steps, before {_STEPS} were timed")


def _timed(function: Any, spent: list[float]) -> Any:
    def timed(*args: Any) -> Any:
        begin = time.thread_time_ns()
        result = function(*args)
        spent.append(1e-3 * (time.thread_time_ns() - begin))
        return result

    return timed


def _engine_rows(systems: list[str], batches: list[int], runs: int) -> list[dict[str, Any]]:
    """All engines are started together; each is asked alone, in turn, while the others wait."""
    with engine_process.scratch("host") as folder:
        return _rows_of_engines(systems, batches, runs, folder)


def _rows_of_engines(systems: list[str], batches: list[int], runs: int, folder: Path) -> list[dict[str, Any]]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_SHAPE))
    engines: dict[str, Served] = {}
    values: dict[tuple[int, str], list[float]] = {}
    try:
        for system in systems:
            ours, runner = _ENGINES[system]
            with patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": runner}):
                log = folder / f"{system.replace('/', '-')}.log"
                engines[system] = Served(system, model, _arguments(model, max(batches), batches, ours), log)
        for system, engine in engines.items():
            facts, (ours, runner) = engine.facts(), _ENGINES[system]
            is_meant = facts["kvcompile"] == ours and facts["runner"] == f"V{int(runner) + 1}"
            if not facts["asynchronous"] or not is_meant:
                raise UsageError(f"{system}: the engine is {facts}, not what is to be measured")
        for seed in range(1 + runs):  # the first warms up
            for batch in batches:
                for system, engine in engines.items():
                    found = engine.run(_PROMPT, _OUTPUT, batch, seed)
                    if seed:
                        values.setdefault((batch, system), []).append(1e3 * statistics.median(found["tpot"]))
    finally:
        for engine in engines.values():
            engine.close()
    return [record.row(f"decode {batch}", s, "step_time", "ms", given) for (batch, s), given in values.items()]


def _arguments(model: Path, places: int, batches: list[int], ours: bool) -> dict[str, Any]:
    return {
        **engine_process.model_arguments(model),
        "gpu_memory_utilization": 0.2,
        "max_model_len": 2048,
        "max_num_seqs": places,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": sorted({*batches, 1}),
        **({"compilation_config": NAME} if ours else {}),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title="host time of a decode step, median (least to most)", title_justify="left")
    for heading in ("", "system", "of", "time"):
        table.add_column(heading, justify="right" if heading == "time" else "left")
    for row in rows:
        shown = f"{row['median']:.3g} {row['unit']} ({row['min']:.3g} to {row['max']:.3g})"
        table.add_row(row["case"], row["system"], row["metric"], shown)
    record.console().print(table)
