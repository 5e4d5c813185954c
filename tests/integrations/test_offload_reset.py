"""A reset of the prefix cache, as after new weights, whatever is being copied: nothing of before is read after it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvcompile.integrations.vllm.replay import Replay
from kvcompile.offload.counters import Reason
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    Clock,
    assert_all_served,
    assert_nothing_is_left,
    at_times,
    mixed,
    rounds,
    simulate,
    soon_or_later,
)

BLOCKS = 40


def _assert_forgotten(scheduler: Any) -> None:
    """Nothing can be found on either level, and what is out of the pool is what copies are at."""
    pool, books = scheduler.kv_cache_manager.block_pool, scheduler.offload.books
    assert not books.known() and not len(books.prefixes)
    assert not any(block.block_hash for block in pool.blocks)
    transfers = scheduler.offload.transfers
    under_way = {store.block.block_id for store in transfers.stores.values() if store.pinned}
    under_way |= {block.block_id for load in transfers.loads.values() for block in load.blocks}
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(under_way)


@BOTH
@pytest.mark.parametrize("fails", [lambda rng: False, at_times], ids=["well", "failing"])
def test_a_reset_forgets_every_copy(asynchronous: bool, fails: Callable[[random.Random], bool]) -> None:
    steps, restored = 0, []

    def reset(run: Replay) -> None:
        nonlocal steps
        steps += 1
        scheduler = run.scheduler
        waits = scheduler.finished_recving_kv_req_ids
        if not (steps % 50 == 0 or waits and len(restored) < 5):
            return
        restored.extend(waits)
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        _assert_forgotten(scheduler)

    scheduler, run, _ = simulate(mixed(40), BLOCKS, asynchronous=asynchronous, fails=fails, after_step=reset)
    assert_all_served(run)
    assert steps > 200 and restored
    assert scheduler.offload.counters.fallbacks[Reason.RESET]
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize("prune", [False, True], ids=["whole", "pruned"])
def test_a_reset_while_requests_are_loaded_has_them_computed_again_and_their_blocks_set_aside_until_the_copies_end(
    asynchronous: bool, order: str, prune: bool
) -> None:
    resets, aside, gone_on = 0, set(), []

    def reset(run: Replay) -> None:
        nonlocal resets
        scheduler = run.scheduler
        loads = scheduler.offload.transfers.loads
        gone_on.extend(name for name in aside & loads.keys() if loads[name].request in scheduler.running)
        new = loads.keys() - aside
        if not new or resets == 10:
            return
        resets += 1
        aside.update(new)
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert all(load.aside for load in loads.values())
        _assert_forgotten(scheduler)

    scheduler, run, worker = simulate(
        mixed(60),
        BLOCKS,
        asynchronous=asynchronous,
        order=order,
        prune=prune,
        late=lambda rng: rng.choice((1, 3, 8)),
        after_step=reset,
    )
    assert_all_served(run)
    assert resets == 10 and gone_on
    assert worker.weights == 10
    assert scheduler.offload.counters.restores > 0  # of those since
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_reset_while_prefixes_are_loaded_has_them_computed_and_says_so(asynchronous: bool) -> None:
    resets = 0

    def reset(run: Replay) -> None:
        nonlocal resets
        scheduler = run.scheduler
        if resets < 3 and any(load.prefix_hits is not None for load in scheduler.offload.transfers.loads.values()):
            resets += 1
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            _assert_forgotten(scheduler)

    scheduler, run, _ = simulate(rounds(8, 6), 60, asynchronous=asynchronous, late=lambda rng: 3, after_step=reset)
    assert_all_served(run)
    assert resets == 3
    assert scheduler.offload.counters.fallbacks[Reason.RESET] >= 3
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_reset_that_leaves_requests_running_is_refused_while_any_holds_blocks_and_does_no_harm(
    asynchronous: bool,
) -> None:
    """What is being loaded is not used all the same: its copies are gone."""
    refused = 0

    def reset(run: Replay) -> None:
        nonlocal refused
        scheduler = run.scheduler
        if scheduler.offload.transfers.loads and refused < 10:
            refused += 1
            assert not scheduler.reset_prefix_cache()
            assert not scheduler.offload.books.known()

    scheduler, run, worker = simulate(
        mixed(40), BLOCKS, asynchronous=asynchronous, late=soon_or_later, after_step=reset
    )
    assert_all_served(run)
    assert refused == 10 and worker.weights == 0
    assert_nothing_is_left(scheduler)


@BOTH
def test_blocks_that_copies_alone_hold_are_no_reason_to_refuse_a_reset(asynchronous: bool) -> None:
    pinned = 0

    def reset(run: Replay) -> None:
        nonlocal pinned
        scheduler = run.scheduler
        if scheduler.requests or not list(scheduler.offload.pins()):
            return
        pinned += 1
        assert scheduler.reset_prefix_cache()
        _assert_forgotten(scheduler)

    scheduler, run, _ = simulate(rounds(4, 6), 60, asynchronous=asynchronous, late=lambda rng: 5, after_step=reset)
    assert_all_served(run)
    assert pinned
    assert_nothing_is_left(scheduler)


def test_a_reset_after_a_load_that_is_never_answered_works_too() -> None:
    never, resets = [], 0

    def late(rng: random.Random) -> int | None:
        return None if never else 0

    def reset(run: Replay) -> None:
        nonlocal resets
        scheduler = run.scheduler
        restored = scheduler.offload.counters.restores > 3
        never[:] = [True] * (restored and not scheduler.offload.transfers.late)
        if scheduler.offload.transfers.late and resets < 3:
            resets += 1
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            _assert_forgotten(scheduler)

    scheduler, run, _ = simulate(mixed(40), 2 * BLOCKS, late=late, clock=Clock(), after_step=reset)
    assert_all_served(run)
    assert resets == 3
    assert scheduler.offload.why_off is Reason.SWITCHED_OFF


@BOTH
def test_who_leaves_while_it_is_loaded_is_gone_at_once_and_another_may_have_its_id(asynchronous: bool) -> None:
    """vLLM makes ids unique unless it is told not to, and ends the engine for one that is still there."""
    again: list[int] = []

    def leave_and_come_back(run: Replay) -> None:
        scheduler = run.scheduler
        for load in list(scheduler.offload.transfers.loads.values()):
            index = int(load.request.request_id)
            if load.aside or index in again or len(again) == 12:
                continue
            again.append(index)
            run.abort([index])
            assert str(index) not in scheduler.requests and load.aside
            run.outcome.lives[index] = type(run.outcome.lives[index])(run.outcome.lives[index].arrival)
            run._add(index, run.outcome.lives[index].arrival)

    trace = [*mixed(40), *rounds(4, 6)[6:]]
    scheduler, run, _ = simulate(
        trace, BLOCKS, asynchronous=asynchronous, late=lambda rng: rng.choice((2, 9)), after_step=leave_and_come_back
    )
    assert_all_served(run)
    assert len(again) == 12 and not any(life.aborted for life in run.outcome.lives)
    assert_nothing_is_left(scheduler)
