"""Pruning in vLLM's scheduler and block pool with a simulated worker: asynchronous too, with late words and none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvcompile.schedule.trace import Arrival
from tests.integrations.prune_replays import Late, Word, always, mixed, pruning_scheduler, replayed, run_of


@pytest.mark.parametrize(
    ("asynchronous", "ordered", "name"),
    [
        (False, True, "PruningLengthAwareScheduler"),
        (True, True, "PruningLengthAwareAsyncScheduler"),
        (False, False, "PruningScheduler"),
        (True, False, "PruningAsyncScheduler"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("word", [always, Late(0.0), Late(0.5)], ids=["at once", "late", "late or never"])
def test_books_are_right_after_every_step_and_every_block_is_free_at_the_end(
    word: Word, seed: int, asynchronous: bool, ordered: bool, name: str
) -> None:
    trace = mixed(150, seed)
    scheduler, run = replayed(trace, 90, asynchronous, word, ordered=ordered)
    assert type(scheduler).__name__ == name and isinstance(scheduler, AsyncScheduler) is asynchronous
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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_what_a_worker_refuses_to_prune_is_not_counted_on_and_nobody_is_preempted_for_it(asynchronous: bool) -> None:
    """Answers shorter than the horizon, so that whoever is admitted is never preempted, and the refusals are many."""
    trace = [Arrival(i * 0.01, 100 + 53 * i % 600, 60, 60) for i in range(120)]
    fields = {"max_num_batched_tokens": 1024, "order": {"horizon_steps": 64}}
    scheduler, run = replayed(trace, 90, asynchronous, lambda done: {}, **fields)
    assert scheduler.worker_refused and scheduler.released_blocks == 0
    assert run.outcome.preemptions == 0
    scheduler, run = replayed(trace, 90, asynchronous, always, **fields)
    assert not scheduler.worker_refused and scheduler.released_blocks > 0
    assert run.outcome.preemptions == 0


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
    scheduler, _ = pruning_scheduler(90, asynchronous=False)
    sampling = SimpleNamespace(prompt_logprobs=None, extra_args={"kv_budget_tokens": 10})
    request = SimpleNamespace(sampling_params=sampling, num_tokens=1000, num_preemptions=0)
    assert scheduler.kv_cache_manager.plan_of(request) is None


def test_what_is_rewritten_is_never_hit() -> None:
    """A prompt that comes again and stays whole: its hits end where the first one's pages were released."""
    first, again = Arrival(0.0, 300, 5, 5, prefix_tokens=300), Arrival(9.0, 300, 5, 5, prefix_tokens=300)
    hits = []
    scheduler, config = pruning_scheduler(90, asynchronous=False, max_num_batched_tokens=1024)
    manager = scheduler.kv_cache_manager
    find, plan_of = manager.get_computed_blocks, manager.plan_of
    manager.plan_of = lambda request: plan_of(request) if request.request_id == "0" else None

    def noted(request: Any) -> Any:
        found = find(request)
        hits.append(found[1])
        return found

    scheduler.kv_cache_manager.get_computed_blocks = noted
    run_of([first, again], scheduler, config, abort_every=0)
    assert hits == [0, (300 - 64) // 16 * 16]
