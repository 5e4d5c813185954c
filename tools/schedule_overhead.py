"""What a call of schedule() costs while many requests wait: vLLM's scheduler and kvcompile's in turn."""

from __future__ import annotations

import random
import statistics
from typing import Any

from rich.table import Table

from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival
from kvcompile.tools import record

WAITING = (100, 1000, 10_000)
# Prompts are equally long, so that both start the same requests at the same time as long as there are blocks: what
# differs is the cost. With few blocks, the look-ahead works at every admission.
POOLS = {"enough blocks": 100_000, "few blocks": 3_000}
_SYSTEMS = ("vllm-fcfs", "kvcompile")
_STEPS, _SKIPPED, _PLACES = 400, 20, 128


class _Enough(Exception):
    """So many steps were timed."""


def measure(runs: int) -> list[dict[str, Any]]:
    """Rows of the processor time of one call, mean over 380 calls, and a table of them."""
    rows = []
    table = Table(title=f"schedule(), {_PLACES} running, us of processor time: median of {runs}", title_justify="left")
    for heading in ("", *_SYSTEMS, "added"):
        table.add_column(heading, justify="right" if heading else "left")
    for pool, blocks in POOLS.items():
        for waiting in WAITING:
            case = f"{waiting} waiting, {pool}"
            values: dict[str, list[float]] = {system: [] for system in _SYSTEMS}
            for seed in range(runs):
                for system in _SYSTEMS:
                    values[system].append(_mean_us(system, waiting, blocks, seed))
            rows += [record.row(case, system, "schedule_time", "us", values[system]) for system in _SYSTEMS]
            stock, ours = (statistics.median(values[system]) for system in _SYSTEMS)
            table.add_row(case, f"{stock:.0f}", f"{ours:.0f}", f"{100 * (ours / stock - 1):+.1f} %")
    record.console().print(table)
    return rows


def _mean_us(system: str, waiting: int, blocks: int, seed: int) -> float:
    from kvcompile.integrations.vllm.replay import Replay
    from kvcompile.integrations.vllm.replay_systems import scheduler_for

    rng = random.Random(seed)
    # As many more as will have started by the end, about.
    trace = [Arrival(0.0, 256, rng.randint(50, 400), 1024) for _ in range(waiting + _STEPS // 2)]
    scheduler, config = scheduler_for(
        system, blocks, asynchronous=True, max_model_len=16384, max_num_seqs=_PLACES, max_num_batched_tokens=8192
    )

    def stop(replay: Replay) -> None:
        if replay.outcome.steps >= _STEPS:
            raise _Enough

    replay = Replay(scheduler, config, H200_LLAMA_8B, after_step=stop)
    try:
        replay.run(trace)
    except _Enough:
        return 1e6 * statistics.mean(replay.outcome.schedule_s[_SKIPPED:_STEPS])
    raise RuntimeError(f"the trace ended after {replay.outcome.steps} steps, before {_STEPS} were timed")
