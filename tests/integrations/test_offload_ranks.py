"""Offload on several ranks: a page is copied when all of them have said so, whenever and however often they speak."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvcompile.integrations.vllm.offload_messages import Answer, Word
from kvcompile.integrations.vllm.offload_transfers import Transfers
from kvcompile.offload.counters import Reason
from kvcompile.offload.host_pool import HostPool
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    Clock,
    assert_all_served,
    assert_nothing_is_left,
    mixed,
    rounds,
    simulate,
    some_leave,
    soon_or_later,
)

BLOCKS = 40


def _transfers(ranks: int) -> tuple[Transfers, HostPool]:
    host = HostPool(4)
    transfers = Transfers(lambda: host, ranks)
    transfers.bind(BlockPool(9, True, 16))
    return transfers, host


def _store(ranks: int) -> tuple[Transfers, int]:
    transfers, host = _transfers(ranks)
    copy = host.take("a", 0, 16)
    transfers.store(copy, transfers.blocks([1])[0])
    return transfers, copy.tag


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_store_has_ended_when_the_last_rank_has_spoken_in_any_order(ranks: int) -> None:
    transfers, tag = _store(ranks)
    order = random.Random(ranks).sample(range(ranks), ranks)
    for rank in order[:-1]:
        assert not list(transfers.stores_ended(Word({tag: Answer(1)}).of_rank(rank)))
    (store,) = transfers.stores_ended(Word({tag: Answer(1)}).of_rank(order[-1]))
    assert store.answer == Answer((1 << ranks) - 1)
    assert not list(transfers.stores_ended(Word({tag: Answer(1)}).of_rank(order[0])))  # once more, and too late


def test_a_rank_that_says_it_twice_does_not_speak_for_another() -> None:
    transfers, tag = _store(2)
    word = Word({tag: Answer(1)}).of_rank(1)
    assert not list(transfers.stores_ended(word))
    assert not list(transfers.stores_ended(word))
    assert not list(transfers.stores_ended(word.aggregate(word)))
    assert len(list(transfers.stores_ended(Word({tag: Answer(1)}).of_rank(0)))) == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_that_could_not_is_enough_and_the_others_are_waited_for(bad: int) -> None:
    """Before they have spoken, they may still be writing."""
    transfers, host = _transfers(2)
    copy = host.take("a", 0, 16)
    host.filled(copy, well=True)
    transfers.load(SimpleNamespace(request_id="a"), [copy], transfers.blocks([3]))
    (number,) = transfers.loads
    assert not list(transfers.loads_ended(Word(loads={number: Answer(1, "checksum")}).of_rank(bad)))
    (load,) = transfers.loads_ended(Word(loads={number: Answer(1)}).of_rank(1 - bad))
    assert load.answer.why_not == "checksum"


def test_words_of_one_step_add_up_as_those_of_several_do() -> None:
    transfers, tag = _store(3)
    words = [Word({tag: Answer(1)}).of_rank(rank) for rank in range(3)]
    (store,) = transfers.stores_ended(words[0].aggregate(words[1]).aggregate(words[2]))
    assert not store.answer.why_not


@BOTH
@ORDERS
def test_two_ranks_that_are_late_each_in_its_own_way_lose_nothing(asynchronous: bool, order: str) -> None:
    scheduler, run, worker = simulate(
        [*mixed(30), *rounds(2, 6)[6:]],
        BLOCKS,
        asynchronous=asynchronous,
        order=order,
        ranks=2,
        late=soon_or_later,
        repeat_words=lambda: True,
        aborts=some_leave(30),
    )
    assert_all_served(run)
    counters = scheduler.offload.counters
    assert counters.restores > 10 and not counters.fallbacks
    assert worker.reads > 5000
    assert_nothing_is_left(scheduler)


@BOTH
def test_what_fails_on_one_rank_is_computed_again_on_both(asynchronous: bool) -> None:
    scheduler, run, _ = simulate(
        mixed(40),
        BLOCKS,
        asynchronous=asynchronous,
        ranks=2,
        late=soon_or_later,
        fails=lambda rng: rng.random() < 0.15,
        aborts=some_leave(40),
    )
    assert_all_served(run)
    fallbacks = scheduler.offload.counters.fallbacks
    assert fallbacks[Reason.COPY_LOST] and fallbacks[Reason.LOAD_FAILED]
    assert scheduler.offload.counters.restores > 0
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_rank_whose_words_are_lost_at_times_is_not_waited_for(asynchronous: bool) -> None:
    rng = random.Random(0)
    scheduler, run, _ = simulate(
        mixed(40),
        2 * BLOCKS,
        asynchronous=asynchronous,
        ranks=2,
        lose_words=lambda: rng.random() < 0.05,
        clock=Clock(),
    )
    assert_all_served(run)
    assert scheduler.offload.why_off is Reason.SWITCHED_OFF
    assert not scheduler.offload.books.known()
