"""Offload in vLLM's scheduler with a simulated worker: whatever goes wrong, every step reads what it must."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcompile.integrations.vllm import offload_transfers
from kvcompile.integrations.vllm.offload_messages import Word
from kvcompile.integrations.vllm.replay import Replay
from kvcompile.integrations.vllm.replay_outcome import Life
from kvcompile.offload.counters import Counters, Reason
from kvcompile.schedule.trace import Arrival
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    Clock,
    always,
    assert_all_served,
    assert_nothing_is_left,
    at_times,
    mixed,
    simulate,
    some_leave,
    soon_or_later,
)

BLOCKS = 40


def sometimes_never(rng: random.Random) -> int | None:
    return None if rng.random() < 0.1 else rng.choice((0, 1, 3))


@BOTH
@ORDERS
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_computed_twice(asynchronous: bool, order: str, seed: int) -> None:
    scheduler, run, worker = simulate(mixed(60, seed), BLOCKS, asynchronous=asynchronous, order=order)
    assert_all_served(run)
    assert run.outcome.preemptions > 20
    assert run.outcome.recomputed_tokens == 0
    counters: Counters = scheduler.offload.counters
    assert (counters.lost_pages, counters.fallbacks.total()) == (0, 0)
    assert counters.restores > 20
    assert counters.stored_bytes == counters.stored_pages * counters.page_bytes
    assert worker.reads > 10_000
    assert_nothing_is_left(scheduler)


@BOTH
def test_without_a_prefix_cache_all_comes_from_the_host(asynchronous: bool) -> None:
    scheduler, run, _ = simulate(mixed(40), BLOCKS, asynchronous=asynchronous, enable_prefix_caching=False)
    assert_all_served(run)
    assert run.outcome.recomputed_tokens == 0
    assert scheduler.offload.counters.device_tokens == 0
    # A step in flight may end one that was just preempted.
    assert 10 < scheduler.offload.counters.restores <= run.outcome.preemptions
    assert not scheduler.offload.counters.fallbacks


@BOTH
@ORDERS
def test_copies_that_take_several_steps_lose_nothing(asynchronous: bool, order: str) -> None:
    scheduler, run, _ = simulate(
        mixed(40), BLOCKS, asynchronous=asynchronous, order=order, late=soon_or_later, aborts=some_leave(40)
    )
    assert_all_served(run)
    assert scheduler.offload.counters.restores > 10
    assert scheduler.offload.counters.fallbacks.total() == 0
    assert_nothing_is_left(scheduler)


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_copies_that_fail_have_their_requests_computed_again(asynchronous: bool, seed: int) -> None:
    scheduler, run, _ = simulate(
        mixed(40, seed), BLOCKS, asynchronous=asynchronous, fails=at_times, late=soon_or_later, aborts=some_leave(40)
    )
    assert_all_served(run)
    fallbacks = scheduler.offload.counters.fallbacks
    assert fallbacks[Reason.COPY_LOST] and fallbacks[Reason.LOAD_FAILED]
    assert scheduler.offload.counters.restores > 0
    assert_nothing_is_left(scheduler)


def test_if_every_copy_fails_all_is_as_without_offload() -> None:
    scheduler, run, _ = simulate(mixed(40), BLOCKS, fails=always)
    assert_all_served(run)
    assert scheduler.offload.counters.restores == 0
    assert set(scheduler.offload.counters.fallbacks) == {Reason.COPY_LOST}
    assert_nothing_is_left(scheduler)


def test_without_a_host_pool_all_is_as_without_offload_and_no_copy_is_tried_twice() -> None:
    tried = []

    def note(run: Replay) -> None:
        tried.append(run.scheduler.offload.books.pool._tags)

    scheduler, run, _ = simulate(mixed(40), BLOCKS, host_memory=False, after_step=note)
    assert_all_served(run)
    assert scheduler.offload.counters.stored_pages == 0
    assert set(tried) == {0, tried[-1]}  # in one step
    fallbacks = scheduler.offload.counters.fallbacks
    assert fallbacks[Reason.NO_POOL] > 10 and fallbacks.keys() <= {Reason.NO_POOL, Reason.COPY_LOST}
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_worker_that_never_answers_is_not_waited_for(asynchronous: bool) -> None:
    scheduler, run, worker = simulate(
        mixed(40), 2 * BLOCKS, asynchronous=asynchronous, late=sometimes_never, clock=Clock(), aborts=some_leave(40)
    )
    assert_all_served(run)
    fallbacks = scheduler.offload.counters.fallbacks
    assert fallbacks[Reason.SWITCHED_OFF] or fallbacks[Reason.NO_ANSWER]
    assert scheduler.offload.why_off is Reason.SWITCHED_OFF
    assert not scheduler.offload.books.known()


@BOTH
def test_answers_that_are_lost_do_no_harm(asynchronous: bool) -> None:
    rng = random.Random(0)
    scheduler, run, _ = simulate(
        mixed(40), 2 * BLOCKS, asynchronous=asynchronous, lose_words=lambda: rng.random() < 0.1, clock=Clock()
    )
    assert_all_served(run)
    assert not scheduler.offload.books.known()


@BOTH
def test_a_load_that_is_never_answered_is_not_waited_for_where_nobody_runs(asynchronous: bool) -> None:
    """The outputs of such steps are empty."""
    schedulers, lost = [], []

    def lose() -> bool:
        lost.extend(schedulers[0].offload.transfers.loads if schedulers else ())
        return bool(lost)

    def note(run: Replay) -> None:
        schedulers[:] = [run.scheduler]

    trace = [Arrival(0.0, 100, 60, 60) for _ in range(3)]
    scheduler, run, _ = simulate(
        trace, 1 + 28, asynchronous=asynchronous, lose_words=lose, clock=Clock(), after_step=note
    )
    assert_all_served(run)
    assert scheduler.offload.counters.fallbacks[Reason.NO_ANSWER] == 1


def test_late_answers_give_back_what_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_transfers, "DEADLINE_S", 5.0)
    monkeypatch.setattr(offload_transfers, "DEADLINE_OUTPUTS", 2)
    scheduler, run, worker = simulate(mixed(40), BLOCKS, late=lambda rng: rng.choice((0, 0, 30)), clock=Clock())
    assert_all_served(run)
    counters = scheduler.offload.counters
    assert counters.fallbacks and counters.restores
    # What is still set aside comes back with the last of the answers.
    worker.ranks[0].copies._step += 100
    scheduler.offload.heard(worker.ranks[0].half.take_word() or Word())
    assert scheduler.offload.why_off is None
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize("host_pages", [1, 10])
def test_a_full_host_pool_costs_computing_again_and_never_a_preempted_request_that_it_holds(
    asynchronous: bool, order: str, host_pages: int
) -> None:
    scheduler, run, _ = simulate(
        mixed(40), BLOCKS, asynchronous=asynchronous, order=order, host_pages=host_pages, late=soon_or_later
    )
    assert_all_served(run)
    assert set(scheduler.offload.counters.fallbacks) == {Reason.HOST_FULL}
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_pool_barely_larger_than_one_request_makes_progress(asynchronous: bool) -> None:
    trace = [Arrival(0.0, 100 + i, 60, 60) for i in range(12)]
    scheduler, run, _ = simulate(trace, 1 + 11, asynchronous=asynchronous, max_model_len=176, late=soon_or_later)
    assert_all_served(run)
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize("fails", [lambda rng: False, at_times], ids=["well", "failing"])
def test_whoever_is_back_makes_way_for_one_of_higher_priority_if_nobody_can_run(
    asynchronous: bool, order: str, fails: Callable[[random.Random], bool]
) -> None:
    """Which comes while the last of its pages do, and needs their blocks."""
    urgent, joined, stuck = Arrival(0.0, 440, 5, 5, priority=-1), 0, 0

    def join(run: Replay) -> None:
        nonlocal joined, stuck
        scheduler = run.scheduler
        if scheduler.finished_recving_kv_req_ids and joined < 3:
            joined += 1
            run.outcome.lives.append(Life(urgent))
            run._add(len(run.outcome.lives) - 1, urgent)
        stuck = 0 if scheduler.running or not scheduler.waiting else stuck + 1
        assert stuck < 100, "nobody runs"

    trace = [Arrival(0.0, 100, 60 if i == 0 else 150, 150, priority=min(i, 1)) for i in range(8)]
    scheduler, run, _ = simulate(
        trace,
        32,
        asynchronous=asynchronous,
        order=order,
        scheduling_policy="priority",
        max_model_len=480,
        fails=fails,
        after_step=join,
    )
    assert_all_served(run)
    assert joined == 3
    assert_nothing_is_left(scheduler)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@ORDERS
def test_who_is_preempted_was_the_likeliest_victim(order: str, policy: str) -> None:
    likely, preempted = [], 0

    def note(run: Replay) -> None:
        nonlocal preempted
        scheduler = run.scheduler
        if likely:
            gone = {request.request_id for request in scheduler.waiting if request.num_preemptions}
            victims = [name for name, preemptions in likely if name in gone and name in scheduler.requests]
            preempted += len(victims)
            assert victims == [name for name, _ in likely][: len(victims)]
        likely[:] = [(request.request_id, request.num_preemptions) for request in scheduler.likely_victims()]

    trace = [replace(arrival, priority=index % 3) for index, arrival in enumerate(mixed(40))]
    _, run, _ = simulate(trace, BLOCKS, order=order, scheduling_policy=policy, after_step=note)
    assert_all_served(run)
    assert preempted > 10


def test_five_hundred_preemptions_leave_nothing_behind() -> None:
    sizes = []

    def note(run: Replay) -> None:
        control = run.scheduler.offload
        sizes.append(
            len(control.transfers.stores)
            + len(control.transfers.loads)
            + len(control.books._copies)
            + len(control.books._shapes)
        )

    scheduler, run, _ = simulate(mixed(620, 3), BLOCKS - 8, after_step=note, late=soon_or_later)
    assert_all_served(run)
    assert scheduler.offload.counters.restores >= 500
    assert max(sizes) < 200
    assert_nothing_is_left(scheduler)
