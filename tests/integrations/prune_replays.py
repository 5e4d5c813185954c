"""Pruning in vLLM's scheduler and block pool with a simulated worker, its books checked after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from typing import Any

from kvcompile.config import PruneConfig, SchedulerConfig
from kvcompile.integrations.vllm import replay
from kvcompile.integrations.vllm.active import PRUNING_WORKER
from kvcompile.integrations.vllm.integrity import check_integrity
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS
from kvcompile.integrations.vllm.scheduler import make_pruning_scheduler, make_scheduler
from kvcompile.schedule.trace import Arrival
from tests.integrations.replays import STEP

BUDGET, WINDOW = 64, 16

Word = Callable[[dict[str, int]], dict[str, int]]  # what the scheduler is told of what the worker has done


def always(done: dict[str, int]) -> dict[str, int]:
    return done


class Late:
    """Every word comes with the next step, where some are lost."""

    def __init__(self, lost: float) -> None:
        self._kept: dict[str, int] = {}
        self._lost, self._rng = lost, random.Random(0)

    def __call__(self, done: dict[str, int]) -> dict[str, int]:
        said = {name: epoch for name, epoch in self._kept.items() if self._rng.random() >= self._lost}
        self._kept = done
        return said


def options(scheduler: dict[str, Any] | None = None, **prune: Any) -> dict[str, Any]:
    prune = {"budget_tokens": BUDGET, "window_tokens": WINDOW, **prune}
    order = SchedulerConfig(**(scheduler or {}))
    return {"prune": asdict(PruneConfig(enabled=True, **prune)), "scheduler": asdict(order)}


def pruning_scheduler(
    blocks: int,
    *,
    asynchronous: bool,
    ordered: bool = True,
    prune: dict[str, Any] | None = None,
    order: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Any, Any]:
    """A scheduler in kvcompile's order or vLLM's, and the configuration that it is of."""
    fields = {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 256, **fields}
    config = replay.replay_config(asynchronous=asynchronous, options=options(order, **(prune or {})), **fields)
    config.parallel_config.worker_cls = PRUNING_WORKER
    return replay.make_scheduler(config, blocks, make_scheduler if ordered else make_pruning_scheduler), config


def run_of(
    trace: list[Arrival],
    scheduler: Any,
    config: Any,
    word: Word = always,
    *,
    abort_every: int = 5,
    after_step: Callable[[Any], None] = lambda scheduler: None,
) -> replay.Replay:
    """The replay of a trace. Of every `abort_every`-th request the client goes away; 0: of none."""
    word = deepcopy(word)  # one that remembers is shared by the tests that it parametrises
    update = scheduler.update_from_output

    def told(output: Any, result: Any) -> Any:
        # A worker says nothing of what it has stored inline: there is nothing to release.
        steps = getattr(output, PLANS).items()
        done = {name: step.plan.epoch for name, step in steps if step.final and not step.plan.inline}
        setattr(result, ACKNOWLEDGED, word(done))
        return update(output, result)

    scheduler.update_from_output = told
    leaving = range(0, len(trace), abort_every) if abort_every else ()
    aborts = {i: random.Random(i).randint(1, 60) for i in leaving}

    def check(run: replay.Replay) -> None:
        check_integrity(run.scheduler)
        after_step(run.scheduler)

    run = replay.Replay(scheduler, config, STEP, aborts=aborts, after_step=check)
    run.run(trace)
    return run


def replayed(
    trace: list[Arrival], blocks: int, asynchronous: bool, word: Word = always, **fields: Any
) -> tuple[Any, replay.Replay]:
    """The scheduler and the replay of a trace."""
    scheduler, config = pruning_scheduler(blocks, asynchronous=asynchronous, **fields)
    return scheduler, run_of(trace, scheduler, config, word)


def mixed(requests: int, seed: int, rate: float = 20.0) -> list[Arrival]:
    """Prompts of one token to many chunks, some of a family with the same beginning. rate: requests a second."""
    rng = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(rate)
        prompt, output = rng.choice((1, 63, 64, 80, rng.randint(1, 700))), rng.randint(1, 80)
        shared = rng.choice((0, 0, prompt // 2 // 16 * 16))
        trace.append(Arrival(now, prompt, output, 100, prefix_group=rng.randint(0, 2), prefix_tokens=shared))
    return trace
