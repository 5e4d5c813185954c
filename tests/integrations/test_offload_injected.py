"""Offload when something happens in the middle of a copy: clients leave, requests are preempted, slots run out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from kvcompile.integrations.vllm import replay
from kvcompile.integrations.vllm.offload_control import OffloadControl
from kvcompile.integrations.vllm.offload_copies import CPUCopies
from kvcompile.integrations.vllm.offload_worker import OffloadWorker
from kvcompile.integrations.vllm.replay import Replay
from kvcompile.offload.books import Books, Life
from kvcompile.offload.host_pool import HostPool
from tests import served_trace
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    assert_all_served,
    assert_nothing_is_left,
    mixed,
    simulate,
)
from tests.integrations.replays import STEP

BLOCKS = 40


def _few_steps(rng: Any) -> int:
    return 4


def _stored(scheduler: Any) -> set[str]:
    """Requests of which a page is being copied to the host."""
    return {store.copy.owner for store in scheduler.offload.transfers.stores.values() if store.copy.owner is not None}


def _loaded(scheduler: Any) -> set[str]:
    return {load.request.request_id for load in scheduler.offload.transfers.loads.values()}


@BOTH
@ORDERS
@pytest.mark.parametrize("under_way", [_stored, _loaded], ids=["stored", "loaded"])
def test_clients_that_leave_while_they_are_copied_leave_nothing_behind(
    asynchronous: bool, order: str, under_way: Any
) -> None:
    left: list[str] = []

    def leave(run: Replay) -> None:
        here = sorted(under_way(run.scheduler) & {r for r in run.scheduler.requests if r not in left})
        if here and len(left) < 12:
            left.append(here[0])
            run.abort([int(here[0])])

    scheduler, run, _ = simulate(
        mixed(40), BLOCKS, asynchronous=asynchronous, order=order, late=_few_steps, after_step=leave
    )
    assert_all_served(run)
    assert len(left) == 12
    assert scheduler.offload.counters.restores > 0 and not scheduler.offload.counters.fallbacks
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
def test_who_is_preempted_while_it_is_copied_and_while_others_come_back_loses_nothing(
    asynchronous: bool, order: str
) -> None:
    """One that is being loaded itself waits, and who waits is nobody's victim."""
    while_stored, while_loaded, watched = 0, 0, []

    def watch(run: Replay) -> None:
        scheduler = run.scheduler
        if watched:
            return
        watched.append(scheduler._preempt_request)

        def preempted(request: Any, timestamp: float) -> None:
            nonlocal while_stored, while_loaded
            assert request.request_id not in _loaded(scheduler)
            while_stored += request.request_id in _stored(scheduler)
            while_loaded += bool(_loaded(scheduler))
            watched[0](request, timestamp)

        scheduler._preempt_request = preempted

    scheduler, run, _ = simulate(
        mixed(60), BLOCKS, asynchronous=asynchronous, order=order, late=_few_steps, after_step=watch
    )
    assert_all_served(run)
    assert while_stored > 3 and while_loaded > 3
    assert (scheduler.offload.counters.fallbacks.total(), run.outcome.recomputed_tokens) == (0, 0)
    assert_nothing_is_left(scheduler)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_flat_over_six_hundred_real_copies_out_and_back() -> None:
    """Both halves, over real memory, without a scheduler: 20 pages of 64 KiB, and every byte is as it was."""
    blocks, pages, page_bytes = 64, 20, 1 << 16
    caches = {f"layer{i}": torch.randint(0, 255, (blocks, page_bytes // 2), dtype=torch.uint8) for i in range(2)}
    books = Books(HostPool(2 * pages), 16)
    control, pool = OffloadControl(books, page_bytes), BlockPool(blocks, True, 16)
    control.bind(pool)
    worker = OffloadWorker(2 * pages * page_bytes, page_bytes, CPUCopies)
    worker.register(caches)
    table = pool.get_new_blocks(pages)
    before = {name: cache[[block.block_id for block in table]].clone() for name, cache in caches.items()}

    def step() -> None:
        worker.execute(control.transfers.take_orders())
        control.heard(worker.take_word())
        control.check_integrity()

    sizes = []
    for cycle in range(600):
        tokens = 16 * pages - cycle % 16
        request = SimpleNamespace(request_id=str(cycle), num_computed_tokens=0, is_finished=lambda: False)
        for page in range(cycle % 5):  # ahead of need
            control.books.reshape(request.request_id, None)
            control.back_up(request.request_id, page, table[page])
        control.preempted(request.request_id, Life(tokens, 0), table)
        step()
        pool.free_blocks(table)
        table = pool.get_new_blocks(pages)
        for cache in caches.values():
            cache[[block.block_id for block in table]] = 0
        assert control.matched(request, 0) == tokens
        control.allocated(request, table, tokens)
        step()
        control.finished(request.request_id, table)
        sizes.append(_resident_bytes())
    for name, cache in caches.items():
        assert torch.equal(cache[[block.block_id for block in table]], before[name])
    assert control.counters.restores == 600 and not control.counters.fallbacks
    assert books.pool.free == books.pool.slots
    assert max(sizes[300:]) - max(sizes[:300]) < 1 << 20, "memory grows"


def test_offload_does_not_preempt_more_often_than_vllm_does() -> None:
    """A victim whose blocks are all being copied frees none, and vLLM would take the next one in the same step."""
    trace = served_trace.mixed(80)
    config = replay.replay_config(asynchronous=False, **served_trace.FIELDS)
    stock = replay.Replay(replay.make_scheduler(config, 50, replay.stock(config)), config, STEP).run(trace)
    _, run, _ = simulate(trace, 50, **served_trace.FIELDS)
    assert_all_served(run)
    assert 20 < run.outcome.preemptions <= 1.1 * stock.preemptions
    assert run.outcome.recomputed_tokens == 0 < stock.recomputed_tokens
