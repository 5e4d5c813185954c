"""The host as a second level of the prefix cache, with a simulated worker that checks what every step reads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvcompile.integrations.vllm.offload_messages import Answer, Word
from kvcompile.integrations.vllm.offload_prefix import HostPrefix
from kvcompile.integrations.vllm.offload_transfers import Transfers
from kvcompile.integrations.vllm.replay import Replay
from kvcompile.offload.books import Books, Life
from kvcompile.offload.counters import Reason
from kvcompile.offload.host_pool import HostPool
from kvcompile.schedule.trace import Arrival
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    always,
    assert_all_served,
    assert_nothing_is_left,
    at_times,
    mixed,
    rounds,
    simulate,
    some_leave,
    soon_or_later,
)

BLOCKS = 60  # less than what one round holds


@BOTH
@ORDERS
def test_what_an_ended_request_had_is_found_on_the_host_when_the_device_has_lost_it(
    asynchronous: bool, order: str
) -> None:
    scheduler, run, _ = simulate(rounds(4, 6), BLOCKS, asynchronous=asynchronous, order=order)
    assert_all_served(run)
    counters = scheduler.offload.counters
    # 160 of 176 tokens that are alike, or 7 or 14 fewer, of 18 requests that are not the first of their group.
    found = counters.prefix_host_tokens + counters.prefix_device_tokens
    assert found >= 18 * 144
    assert counters.prefix_host_tokens > 5 * 144
    assert counters.prefix_host_tokens % 16 == 0
    assert not counters.fallbacks
    assert_nothing_is_left(scheduler)


@BOTH
@pytest.mark.parametrize("caching", [True, False])
def test_who_switches_the_prefix_cache_off_has_none_on_the_host(asynchronous: bool, caching: bool) -> None:
    scheduler, run, _ = simulate(rounds(2, 6), BLOCKS, asynchronous=asynchronous, enable_prefix_caching=caching)
    assert_all_served(run)
    assert bool(len(scheduler.offload.books.prefixes)) is caching
    assert bool(scheduler.offload.counters.prefix_host_tokens) is caching


@BOTH
@ORDERS
def test_a_host_pool_smaller_than_what_has_ended_keeps_some_of_it(asynchronous: bool, order: str) -> None:
    trace = [*rounds(4, 6), *mixed(30)]
    trace.sort(key=lambda arrival: arrival.time_s)
    scheduler, run, _ = simulate(
        trace, BLOCKS, asynchronous=asynchronous, order=order, host_pages=30, late=soon_or_later, aborts=some_leave(54)
    )
    assert_all_served(run)
    assert scheduler.offload.counters.restores > 0
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize("fails", [at_times, always], ids=["at times", "always"])
def test_a_prefix_that_cannot_be_loaded_is_computed(asynchronous: bool, order: str, fails: Callable[..., bool]) -> None:
    scheduler, run, _ = simulate(
        rounds(5, 6), BLOCKS, asynchronous=asynchronous, order=order, fails=fails, late=soon_or_later
    )
    assert_all_served(run)
    counters = scheduler.offload.counters
    assert bool(counters.fallbacks[Reason.PREFIX_NOT_LOADED]) is (fails is at_times)
    assert_nothing_is_left(scheduler)


@BOTH
def test_clients_that_leave_while_their_prefix_is_loaded_do_no_harm(asynchronous: bool) -> None:
    left = []

    def leave(run: Replay) -> None:
        for load in list(run.scheduler.offload.transfers.loads.values()):
            if load.prefix_hits is not None and not load.request.is_finished() and len(left) < 8:
                left.append(load.request.request_id)
                run.abort([int(load.request.request_id)])

    scheduler, run, _ = simulate(rounds(6, 6), BLOCKS, asynchronous=asynchronous, late=lambda rng: 3, after_step=leave)
    assert_all_served(run)
    assert len(left) == 8
    assert scheduler.offload.counters.prefix_host_tokens > 0
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize("inline", ["never", "auto"])
def test_a_request_that_will_be_pruned_finds_what_is_not_rewritten(asynchronous: bool, order: str, inline: str) -> None:
    """Of 176 equal tokens of 200, 128 are in pages that it gives up; the rest is its own to rewrite."""
    scheduler, run, _ = simulate(
        rounds(4, 8), BLOCKS, asynchronous=asynchronous, order=order, prune=True, inline=inline, refuses=at_times
    )
    assert_all_served(run)
    counters = scheduler.offload.counters
    assert counters.prefix_host_tokens > 0
    assert scheduler.pruned_tokens > 0
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_reset_of_the_prefix_cache_forgets_what_is_on_the_host_too(asynchronous: bool) -> None:
    resets = 0

    def reset(run: Replay) -> None:
        nonlocal resets
        scheduler = run.scheduler
        if scheduler.running or scheduler.waiting or scheduler.offload.transfers.stores or run.in_flight:
            return
        resets += scheduler.reset_prefix_cache()
        assert not len(scheduler.offload.books.prefixes)

    scheduler, run, _ = simulate(rounds(4, 6), BLOCKS, asynchronous=asynchronous, after_step=reset)
    assert_all_served(run)
    assert resets
    assert scheduler.offload.counters.prefix_host_tokens == 0


def _parts() -> tuple[HostPrefix, Transfers, BlockPool]:
    books = Books(HostPool(4), 16)
    transfers = Transfers(lambda: books.pool, ranks=1)
    pool = BlockPool(9, True, 16)
    transfers.bind(pool)
    return HostPrefix(books, transfers), transfers, pool


def _hashed(pool: BlockPool, count: int) -> list[Any]:
    """Blocks of a request that holds them, as after a prompt of so many whole blocks."""
    blocks = pool.get_new_blocks(count)
    request = SimpleNamespace(block_hashes=[b"%d" % index for index in range(count)])
    pool.cache_full_blocks(request, blocks, 0, count, 16, 0)
    assert blocks[0].block_hash == make_block_hash_with_group_id(b"0", 0)
    return blocks


def test_no_more_is_copied_in_a_step_than_asked_and_the_first_pages_before_others() -> None:
    prefix, transfers, pool = _parts()
    blocks = _hashed(pool, 3)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    prefix.copy_ended(2)
    assert [move.block for move in transfers.take_orders().stores] == [block.block_id for block in blocks[:2]]
    prefix.copy_ended(2)
    assert len(transfers.take_orders().stores) == 1
    prefix.copy_ended(2)
    assert transfers.take_orders().stores == ()


def test_what_somebody_holds_or_has_taken_since_is_not_copied() -> None:
    """Whoever holds it may be computing it in this very step, and who has taken it has written to it."""
    prefix, transfers, pool = _parts()
    blocks = _hashed(pool, 3)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    pool.touch(blocks[:1])
    pool.evict_blocks({blocks[1].block_id})
    prefix.copy_ended(9)
    assert [move.block for move in transfers.take_orders().stores] == [blocks[2].block_id]
    assert list(transfers.pins()) == [blocks[2].block_id]


def test_a_host_pool_without_a_slot_to_give_takes_nothing() -> None:
    prefix, transfers, pool = _parts()
    assert len(prefix._books.preempt("another", Life(tokens=32, first=0))) == 2
    blocks = _hashed(pool, 4)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    prefix.copy_ended(9)  # four slots, of which two are not to be had
    assert len(transfers.take_orders().stores) == 2


def _copied(prefix: HostPrefix, transfers: Transfers) -> list[int]:
    """Pages that are kept once all that has ended is copied a page a step, the first to go first."""
    while prefix._ended:
        prefix.copy_ended(1)
        for store in transfers.stores_ended(Word({move.tag: Answer(1) for move in transfers.take_orders().stores})):
            prefix._books.stored(store.copy, well=True)
            transfers.unpin(store)
    prefix._books.check_integrity()
    return [copy.page for copy in prefix._books.prefixes.kept()]


def test_of_what_is_copied_after_its_end_too_the_last_pages_go_first() -> None:
    prefix, transfers, pool = _parts()
    blocks = _hashed(pool, 3)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    assert _copied(prefix, transfers) == [2, 1, 0]


def test_the_first_pages_go_last_where_the_end_of_a_request_was_on_the_host_before_too() -> None:
    prefix, transfers, pool = _parts()
    prefix._books.stored(prefix._books.keep(2, b"2"), well=True)
    blocks = _hashed(pool, 3)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    assert _copied(prefix, transfers) == [2, 1, 0]


def test_the_first_pages_go_last_where_the_host_has_no_slot_for_the_end_of_a_request_too() -> None:
    prefix, transfers, pool = _parts()
    prefix._books.preempt("another", Life(tokens=32, first=0))
    blocks = _hashed(pool, 3)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    prefix.copy_ended(9)
    assert [copy.page for copy in prefix._books.prefixes.kept()] == [1, 0]


def test_of_a_request_longer_than_the_host_has_slots_the_first_pages_are_kept() -> None:
    prefix, transfers, pool = _parts()
    blocks = _hashed(pool, 6)
    prefix.ended(blocks)
    pool.free_blocks(reversed(blocks))
    assert _copied(prefix, transfers) == [3, 2, 1, 0]


def test_a_request_finds_no_more_than_it_may_have_from_others() -> None:
    prefix, _, _ = _parts()
    for page in range(3):
        copy = prefix._books.keep(page, b"%d" % page)
        prefix._books.stored(copy, well=True)
    request = SimpleNamespace(request_id="a", block_hashes=[b"0", b"1", b"2"])
    for most, hits, tokens in ((48, 0, 48), (47, 0, 32), (47, 16, 16), (15, 0, 0), (32, 32, 0), (0, 0, 0)):
        prefix.most_hits = lambda request, most=most: most
        assert prefix.found(request, hits) == tokens


def test_a_single_request_that_comes_again_finds_its_prompt_on_the_device_and_asks_the_host_for_nothing() -> None:
    trace = [Arrival(1000.0 * i, 100, 4, 4, 1000, 96) for i in range(3)]
    scheduler, run, _ = simulate(trace, BLOCKS)
    assert_all_served(run)
    counters = scheduler.offload.counters
    assert (counters.prefix_device_tokens, counters.prefix_host_tokens, counters.loaded_pages) == (2 * 96, 0, 0)
