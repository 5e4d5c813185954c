"""A pruned request that was preempted comes back pruned, with the same tokens kept; the worker is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.request import Request

from kvcompile.integrations.vllm.replay import BLOCK_TOKENS, Replay
from kvcompile.offload.books import Life
from kvcompile.offload.counters import Reason
from kvcompile.prune.plan import Plan
from kvcompile.schedule.trace import Arrival
from tests.integrations.offload_simulated import (
    BOTH,
    ORDERS,
    always,
    assert_all_served,
    assert_nothing_is_left,
    at_times,
    simulate,
    some_leave,
    soon_or_later,
)


class KeptPlans:
    """Tells plans that a request has kept over a preemption from those made since."""

    def __init__(self) -> None:
        self._first_seen: dict[int, int] = {}  # epoch of a plan -> how often its request had been preempted

    def of_a_life_before(self, request: Request, plan: Plan) -> bool:
        return self._first_seen.setdefault(plan.epoch, request.num_preemptions) < request.num_preemptions


@BOTH
@pytest.mark.parametrize("late", [lambda rng: 0, soon_or_later], ids=["at once", "late"])
@ORDERS
def test_a_pruned_request_comes_back_pruned(asynchronous: bool, order: str, late: Callable[..., int]) -> None:
    trace = [Arrival(0.0, random.Random(i).randint(60, 300), 150, 150) for i in range(30)]
    back, kept = [], KeptPlans()

    def note(run: Replay) -> None:
        scheduler = run.scheduler
        for request in scheduler.running:
            if request.request_id in scheduler.pruning.committed:
                back.append(kept.of_a_life_before(request, scheduler.pruning.plans[request.request_id]))

    scheduler, run, _ = simulate(
        trace,
        40,
        asynchronous=asynchronous,
        order=order,
        prune=True,
        late=late,
        aborts=some_leave(30),
        after_step=note,
    )
    assert_all_served(run)
    assert any(back)
    assert scheduler.offload.counters.restores > 10
    assert set(scheduler.offload.counters.fallbacks) <= {Reason.PRUNE_PENDING}
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
@pytest.mark.parametrize(
    ("caching", "refuses", "way"),
    [(True, at_times, (False, True)), (True, always, (False, False)), (False, at_times, (True, True))],
    ids=["two-phase", "refused", "inline"],
)
def test_a_request_comes_back_as_it_was_stored(
    asynchronous: bool, order: str, caching: bool, refuses: Callable[..., bool], way: tuple[bool, bool]
) -> None:
    trace = [Arrival(0.0, random.Random(i).randint(60, 300), 100, 100) for i in range(24)]
    back, kept = set(), KeptPlans()  # (stored inline, pruned)

    def note(run: Replay) -> None:
        for request in run.scheduler.running:
            plan = run.scheduler.pruning.plans.get(request.request_id)
            if plan and kept.of_a_life_before(request, plan):
                back.add((plan.inline, request.request_id in run.scheduler.pruning.committed))

    ways = {"asynchronous": asynchronous, "order": order, "enable_prefix_caching": caching, "refuses": refuses}
    scheduler, run, _ = simulate(trace, 60, prune=True, after_step=note, max_num_batched_tokens=512, **ways)
    assert_all_served(run)
    assert way in back
    assert scheduler.offload.counters.restores > 10
    assert_nothing_is_left(scheduler)


@BOTH
@ORDERS
def test_a_request_that_was_too_short_to_be_pruned_comes_back_whole_however_long_it_is_now(
    asynchronous: bool, order: str
) -> None:
    """It comes back for its next token alone: there would be no queries to score by."""
    trace = [Arrival(0.0, random.Random(i).randint(30, 79), 150, 150) for i in range(24)]
    back = []

    def note(run: Replay) -> None:
        scheduler = run.scheduler
        back.extend(
            request.num_tokens
            for request in scheduler.running
            if request.num_preemptions and scheduler.offload.books.copied(request.request_id)
        )
        assert not scheduler.pruning.plans

    scheduler, run, _ = simulate(trace, 40, asynchronous=asynchronous, order=order, prune=True, after_step=note)
    assert_all_served(run)
    assert max(back) > 2 * 80
    assert scheduler.offload.counters.restores > 10
    assert not scheduler.offload.counters.fallbacks
    assert_nothing_is_left(scheduler)


@BOTH
def test_a_pruned_request_stands_to_lose_no_more_than_what_has_no_copy(asynchronous: bool) -> None:
    trace = [Arrival(0.0, random.Random(i).randint(100, 300), 150, 150) for i in range(24)]
    stakes = []

    def note(run: Replay) -> None:
        scheduler = run.scheduler
        for request in scheduler.running:
            life, copied = scheduler._life(request), scheduler.offload.books.copied(request.request_id)
            pruned = isinstance(life, Life) and life.first
            if pruned and copied and life.first + copied == life.tokens // BLOCK_TOKENS:
                stakes.append(scheduler._stake(request).lost_tokens)

    simulate(trace, 40, asynchronous=asynchronous, order="length", prune=True, after_step=note)
    assert len(stakes) > 10 and max(stakes) < BLOCK_TOKENS


@BOTH
@ORDERS
@pytest.mark.parametrize("caching", [True, False], ids=["two-phase", "inline"])
def test_a_pruned_request_whose_copies_fail_is_computed_and_pruned_anew(
    asynchronous: bool, order: str, caching: bool
) -> None:
    trace = [Arrival(0.0, random.Random(i).randint(60, 300), 150, 150) for i in range(24)]
    ways = {"asynchronous": asynchronous, "order": order, "enable_prefix_caching": caching, "fails": at_times}
    scheduler, run, _ = simulate(trace, 32, prune=True, late=soon_or_later, aborts=some_leave(24), **ways)
    assert_all_served(run)
    assert scheduler.offload.counters.fallbacks[Reason.LOAD_FAILED]
    assert_nothing_is_left(scheduler)
