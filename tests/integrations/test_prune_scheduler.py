"""Pruning in vLLM's scheduler and block pool with a simulated worker: asynchronous too, with late words and none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from kvcompile.config import PruneConfig, SchedulerConfig
from kvcompile.integrations.vllm import replay
from kvcompile.integrations.vllm.integrity import check_integrity
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS
from kvcompile.integrations.vllm.scheduler import (
    LengthAwareAsyncScheduler,
    PruningLengthAware,
    PruningLengthAwareScheduler,
)
from kvcompile.schedule.trace import Arrival
from tests.integrations.replays import STEP

OPTIONS = {
    "prune": asdict(PruneConfig(enabled=True, budget_tokens=64, window_tokens=16)),
    "scheduler": asdict(SchedulerConfig()),
}


class PruningAsyncScheduler(PruningLengthAware, LengthAwareAsyncScheduler):
    """As it will be on a GPU."""


Word = Callable[[dict[str, int]], dict[str, int]]  # what the scheduler is told of what the worker has done


def replayed(
    trace: list[Arrival], blocks: int, asynchronous: bool, word: Word, **fields: Any
) -> tuple[Any, replay.Replay]:
    """The scheduler and the replay of a trace, with the books checked after every step."""
    fields = {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 256, **fields}
    config = replay.replay_config(asynchronous=asynchronous, options=OPTIONS, **fields)
    kind = PruningAsyncScheduler if asynchronous else PruningLengthAwareScheduler
    scheduler = replay.make_scheduler(config, blocks, kind)
    update = scheduler.update_from_output

    def told(output: Any, result: Any) -> Any:
        done = {name: step.plan.epoch for name, step in getattr(output, PLANS).items() if step.final}
        setattr(result, ACKNOWLEDGED, word(done))
        return update(output, result)

    scheduler.update_from_output = told
    aborts = {i: random.Random(i).randint(1, 60) for i in range(0, len(trace), 5)}
    run = replay.Replay(scheduler, config, STEP, aborts=aborts, after_step=lambda r: check_integrity(r.scheduler))
    run.run(trace)
    return scheduler, run


def mixed(requests: int, seed: int) -> list[Arrival]:
    """Prompts of one token to many chunks, some of a family with the same beginning."""
    rng = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(20)
        prompt, output = rng.choice((1, 63, 64, 80, rng.randint(1, 700))), rng.randint(1, 80)
        shared = rng.choice((0, 0, prompt // 2 // 16 * 16))
        trace.append(Arrival(now, prompt, output, 100, prefix_group=rng.randint(0, 2), prefix_tokens=shared))
    return trace


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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("word", [always, Late(0.0), Late(0.5)], ids=["at once", "late", "late or never"])
def test_books_are_right_after_every_step_and_every_block_is_free_at_the_end(
    word: Word, seed: int, asynchronous: bool
) -> None:
    trace = mixed(150, seed)
    scheduler, run = replayed(trace, 90, asynchronous, word)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not scheduler.pruning.plans and not scheduler.pruning.committed
    assert scheduler.released_blocks > 0 and scheduler.pruned_tokens % 16 == 0
    for life in run.outcome.lives:
        assert life.aborted or life.tokens == life.arrival.output_tokens


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_requests_that_are_preempted_are_pruned_anew(asynchronous: bool) -> None:
    trace = [Arrival(0.0, 300, 400, 500) for _ in range(12)]
    scheduler, run = replayed(trace, 120, asynchronous, always)
    assert run.outcome.preemptions > 0
    assert all(life.aborted or life.tokens == 400 for life in run.outcome.lives)


def test_a_word_of_an_earlier_life_or_of_nobody_changes_nothing() -> None:
    told = {"nobody": 0, "0": 7}
    scheduler, _ = replayed([Arrival(0.0, 300, 20, 20)], 90, False, lambda done: told)
    assert scheduler.released_blocks == 0


def test_without_a_word_a_request_goes_on_whole() -> None:
    scheduler, run = replayed([Arrival(0.0, 300, 20, 20)], 90, False, lambda done: {})
    assert (scheduler.released_blocks, run.outcome.lives[0].tokens) == (0, 20)
    assert max(blocks for _, blocks in run.outcome.blocks_used) == 20  # 300 + 19 tokens


def test_pruned_requests_hold_what_they_keep() -> None:
    _, run = replayed([Arrival(0.0, 300, 20, 20)], 90, False, always, max_num_batched_tokens=1024)
    # 14 of 19 pages are released; one more comes with 19 new tokens.
    assert [blocks for _, blocks in run.outcome.blocks_used if blocks] == [19 - 14] * 5 + [19 - 14 + 1] * 14


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_blocks_that_a_prune_releases_are_there_for_the_next_request_at_once(asynchronous: bool) -> None:
    trace = [Arrival(0.0, 400, 40, 40), Arrival(0.001, 400, 40, 40)]
    _, run = replayed(trace, 40, asynchronous, always, max_num_batched_tokens=1024)
    # The prompt's step, and those under way when its word comes.
    assert run.outcome.lives[1].started_step <= run.outcome.lives[0].started_step + 3


def test_what_a_request_asks_past_the_front_end_does_not_end_the_scheduler() -> None:
    config = replay.replay_config(asynchronous=False, options=OPTIONS, max_model_len=4096, max_num_seqs=32)
    scheduler = replay.make_scheduler(config, 90, PruningLengthAwareScheduler)
    sampling = SimpleNamespace(prompt_logprobs=None, extra_args={"kv_budget_tokens": 10})
    request = SimpleNamespace(sampling_params=sampling, num_tokens=1000, num_preemptions=0)
    assert scheduler.kv_cache_manager.plan_of(request) is None


def test_what_is_rewritten_is_never_hit() -> None:
    """A prompt that comes again and stays whole: its hits end where the first one's pages were released."""
    first, again = Arrival(0.0, 300, 5, 5, prefix_tokens=300), Arrival(9.0, 300, 5, 5, prefix_tokens=300)
    hits = []
    config = replay.replay_config(
        asynchronous=False, options=OPTIONS, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=1024
    )
    scheduler = replay.make_scheduler(config, 90, PruningLengthAwareScheduler)
    manager = scheduler.kv_cache_manager
    find, plan_of = manager.get_computed_blocks, manager.plan_of
    manager.plan_of = lambda request: plan_of(request) if request.request_id == "0" else None

    def noted(request: Any) -> Any:
        found = find(request)
        hits.append(found[1])
        return found

    scheduler.kv_cache_manager.get_computed_blocks = noted
    update = scheduler.update_from_output

    def told(output: Any, result: Any) -> Any:
        setattr(result, ACKNOWLEDGED, {name: s.plan.epoch for name, s in getattr(output, PLANS).items() if s.final})
        return update(output, result)

    scheduler.update_from_output = told
    replay.Replay(scheduler, config, STEP, after_step=lambda r: check_integrity(r.scheduler)).run([first, again])
    assert hits == [0, (300 - 64) // 16 * 16]
