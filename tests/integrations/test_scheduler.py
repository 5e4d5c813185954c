"""Single decisions of the KV-length-aware scheduler: order, priority, starvation, victims, blocked requests."""

from __future__ import annotations

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from kvcompile.integrations.vllm.replay import Replay
from kvcompile.schedule.trace import Arrival
from tests.integrations.replays import STEP, replay_of, scheduler_of


def _started(outcome) -> list[int]:
    """Requests in the order in which they first started."""
    return list(dict.fromkeys(index for _, index in outcome.admitted))


def test_a_batch_is_of_like_lengths():
    far = [Arrival(0.0, 100 + 250 * i, 20, 20) for i in range(8)]
    near = [Arrival(0.0, 1900 + i, 20, 20) for i in range(4)]
    outcome = replay_of(far + near, 2000, max_num_seqs=4).outcome
    assert sorted(_started(outcome)[:4]) == [8, 9, 10, 11]


def test_of_like_lengths_those_that_the_prefix_cache_knows_come_first():
    first = [Arrival(0.0, 320, 4, 4, prefix_group=500, prefix_tokens=256)]
    later = [Arrival(1.0, 320, 4, 4, prefix_group=group, prefix_tokens=256) for group in (0, 0, 500, 500)]
    outcome = replay_of(first + later, 500, max_num_seqs=4).outcome
    assert _started(outcome) == [0, 3, 4, 1, 2]


def _flood() -> list[Arrival]:
    """Two long requests, then many short ones that are alike and arrive faster than four places serve them."""
    return [
        *(Arrival(0.0, 30 + i, 10, 10) for i in range(4)),
        Arrival(0.001, 900, 10, 10),
        Arrival(0.001, 2000, 10, 10),
        *(Arrival(0.002 + 0.001 * i, 30 + i % 8, 10, 10) for i in range(200)),
    ]


@pytest.mark.parametrize("bound", [1, 3, 10])
def test_under_a_flood_of_others_nobody_waits_for_more_batches_than_the_bound(bound):
    order = _started(replay_of(_flood(), 4000, max_num_seqs=4, options={"max_wait_batches": bound}).outcome)
    # The first four are served, then `bound` batches of four pass the two long ones over.
    assert sorted(order.index(i) for i in (4, 5)) == [4 + 4 * bound, 5 + 4 * bound]


def test_without_a_bound_to_speak_of_the_same_flood_keeps_them_waiting_to_its_end():
    order = _started(replay_of(_flood(), 4000, max_num_seqs=4, options={"max_wait_batches": 1000}).outcome)
    assert min(order.index(i) for i in (4, 5)) > 190


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_priority_comes_before_length(asynchronous):
    trace = [Arrival(0.0, 50 + i % 3, 8, 8, priority=1 + i % 3) for i in range(60)]
    trace += [Arrival(0.01, 3000, 8, 8, priority=0)]
    outcome = replay_of(
        trace,
        4000,
        max_num_seqs=4,
        scheduling_policy="priority",
        asynchronous=asynchronous,
        max_num_batched_tokens=4096,
    ).outcome
    order = _started(outcome)
    assert order.index(60) <= 8  # after those that ran when it came
    rest = [trace[i].priority for i in order[8:] if i != 60]
    assert rest == sorted(rest)


def test_a_worse_priority_is_preempted_first_whatever_it_has_computed():
    options = {"horizon_steps": 1, "reserve_ratio": 0}
    scheduler, config = scheduler_of(130, scheduling_policy="priority", options=options)
    preempt, seen = scheduler._preempt_request, []

    def watched(victim, timestamp):
        seen.append((victim.priority, victim.num_computed_tokens, list(scheduler.running)))
        preempt(victim, timestamp)

    scheduler._preempt_request = watched
    trace = [Arrival(0.0, 150 + 10 * i, 300, 300, priority=i % 3) for i in range(12)]
    Replay(scheduler, config, STEP).run(trace)
    assert len(seen) > 5
    for priority, computed, others in seen:
        assert all(
            other.priority < priority or (other.priority == priority and other.num_computed_tokens >= computed)
            for other in others
        )
    assert {priority for priority, _, _ in seen} >= {1, 2}


def test_without_priorities_they_are_not_looked_at():
    trace = [Arrival(0.0, 50, 8, 8, priority=100 - i) for i in range(10)]
    assert _started(replay_of(trace, 500, max_num_seqs=2).outcome) == list(range(10))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_the_victim_is_the_one_with_the_fewest_computed_tokens_not_the_last(asynchronous):
    # The first is short, the later ones long: vLLM would preempt the last.
    trace = [Arrival(0.0, 40, 200, 200), *(Arrival(0.0, 300, 200, 200) for _ in range(4))]
    fields = {"options": {"horizon_steps": 1, "reserve_ratio": 0}, "asynchronous": asynchronous}
    assert replay_of(trace, 95, **fields).outcome.preempted[0][1] == 0
    assert replay_of(trace, 95, stock=True, asynchronous=asynchronous).outcome.preempted[0][1] == 4


def test_what_waits_for_something_else_is_held_to_the_look_ahead_too(monkeypatch):
    """A request whose grammar was not compiled yet comes by vLLM's other queue; so it is, promoted, an admission."""
    scheduler, config = scheduler_of(101, options={"horizon_steps": 400, "reserve_ratio": 0})
    replay = Replay(scheduler, config, STEP)
    blocked = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    ready = []

    def promote(request):
        if ready:
            request.status = RequestStatus.WAITING
        return bool(ready)

    monkeypatch.setattr(scheduler, "_try_promote_blocked_waiting_request", promote)
    enqueue = scheduler._enqueue_waiting_request

    def enqueue_blocked(request):
        if request.request_id == "1":
            request.status = blocked
        enqueue(request)

    monkeypatch.setattr(scheduler, "_enqueue_waiting_request", enqueue_blocked)

    def after(replay: Replay) -> None:
        if replay.outcome.steps == 5:
            ready.append(True)

    replay.after_step = after
    # Either alone grows to 62 of 100 blocks: both start, but not together.
    outcome = replay.run([Arrival(0.0, 600, 390, 390), Arrival(0.0, 600, 390, 390)])
    assert outcome.preemptions == 0
    assert [life.tokens for life in outcome.lives] == [390, 390]
    steps = dict((index, step) for step, index in outcome.admitted)
    assert steps[1] > steps[0] + 380


def test_vllms_manager_is_itself_again_after_every_step():
    seen = []
    replay_of([Arrival(0.0, 50, 8, 8)], 50, after_step=lambda r: seen.append(type(r.scheduler.kv_cache_manager)))
    assert set(seen) == {KVCacheManager}


def test_the_policy_that_vllm_sees_is_first_come_first_served_in_both():
    for policy in ("fcfs", "priority"):
        scheduler, _ = scheduler_of(50, scheduling_policy=policy)
        assert scheduler.policy is SchedulingPolicy.FCFS
