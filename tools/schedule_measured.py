"""Real engines on a GPU, scheduling asynchronously: vLLM's scheduler and kvcompile's, and what a step takes there."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival, Step
from kvcompile.tools import engine_process, record, schedule_metrics, step_times
from kvcompile.tools.schedule_engine import SYSTEMS
from kvcompile.tools.schedule_mixes import lognormal

CASE = "chat, engine, asynchronous"
REQUESTS, BLOCKS, PER_SECOND, LONGEST_PROMPT, LIMIT_TOKENS = 192, 1500, 40, 512, 1024
_POSITIONS = LONGEST_PROMPT + LIMIT_TOKENS
_FIELDS = {"max_model_len": _POSITIONS, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
# CUDA graphs for steps of up to 256 tokens. Compiling the model would take longer than all the rest, and change both
# systems alike.
_COMPILATION = {"mode": 0, "cudagraph_mode": "FULL"}
_METRICS = ("step_base", "step_prompt_token", "step_decoding_request", "step_context_token")


def chat(seed: int, requests: int = REQUESTS) -> list[Arrival]:
    """Requests that come faster than a GPU with so few blocks serves Llama-3.1-8B."""
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += rng.expovariate(PER_SECOND)
        prompt, output = rng.randint(64, LONGEST_PROMPT), lognormal(rng, 200, 0.7, 16, 768)
        trace.append(Arrival(now, prompt, output, LIMIT_TOKENS))
    return trace


def why_not(model: str) -> str | None:
    """What is missing for the measurement; None if nothing is."""
    if record.gpu() is None:
        return "needs a GPU: on a CPU vLLM schedules synchronously"
    positions = json.loads(Path(model, "config.json").read_text()).get("max_position_embeddings", _POSITIONS)
    if positions < _POSITIONS:
        return f"needs a model of {_POSITIONS:,} positions; that of --engine has {positions:,}"
    return None


def measure(model: str, runs: int) -> list[dict[str, Any]]:
    """Rows of both systems, one run per seed, and of the step times fitted to vLLM's steps, with tables of them.

    Steps determine the fit, not each of its figures: one that is 0 says that others explain what it would, not that it
    costs nothing. `step_error` is by how much the median step is missed.
    """
    console = record.console()
    if reason := why_not(model):
        console.print(f"Measuring engines that schedule asynchronously {reason}.")
        return []
    rows: list[dict[str, Any]] = []
    timed: list[list[tuple[Step, float]]] = []
    for system in SYSTEMS:
        found = engine_process.call(served, model, system, runs)
        rows += schedule_metrics.rows_of(CASE, system, [run["measures"] for run in found])
        if system == "vllm-fcfs":
            timed = [[(Step(*step), seconds) for step, seconds in run["timed"]] for run in found]
    title = f"{REQUESTS} requests, {PER_SECOND} a second, {BLOCKS} blocks, real engine, asynchronous"
    schedule_metrics.show(title, CASE, tuple(SYSTEMS), rows)
    return rows + _fitted(timed, console)


def _fitted(timed: Sequence[Sequence[tuple[Step, float]]], console: Any) -> list[dict[str, Any]]:
    every = [pair for run in timed for pair in run]
    fitted = step_times.fit(every)
    console.print(f"Step time ({', '.join(step_times.UNITS)}), and by how much it misses the median step:")
    errors = {}
    for system, name, time in (
        ("vllm-fcfs", f"fitted to {len(every):,} steps of vLLM", fitted),
        ("simulation", "default", H200_LLAMA_8B),
    ):
        errors[system] = [100 * step_times.error(time, every)]
        console.print(f"  {step_times.written(time)}  {errors[system][0]:.1f} %  {name}")
    figures = zip(*(step_times.in_units(step_times.fit(run)) for run in timed), strict=True)
    return [
        record.row(CASE, "vllm-fcfs", metric, unit.partition(" ")[0], values)
        for metric, unit, values in zip(_METRICS, step_times.UNITS, figures, strict=True)
    ] + [record.row(CASE, system, "step_error", "%", values) for system, values in errors.items()]


def served(
    model: str, system: str, runs: int, requests: int = REQUESTS, other: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Figures and timed steps of each run, all on one engine in this process; `other` fields of LLM replace ours."""
    from kvcompile.integrations.vllm.replay_engine import Engine

    fields = {**engine_process.model_arguments(model), **_FIELDS, "compilation": _COMPILATION}
    fields |= {"num_gpu_blocks_override": BLOCKS, "kv_cache_memory_bytes": 4 << 30, **(other or {})}
    engine = Engine(model, options=SYSTEMS[system], **fields)
    # Whatever is compiled or loaded on first use: a full step of prompts, a short one, and decoding.
    engine.serve([Arrival(0.0, LONGEST_PROMPT, 8, 8)] * 20)
    found = [engine.serve(chat(seed, requests)) for seed in range(runs)]
    engine.shutdown()
    return [{"measures": schedule_metrics.measures(run.outcome), "timed": run.timed} for run in found]
