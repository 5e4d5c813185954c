"""Prompts that are stored inline, in vLLM's scheduler and block pool with a simulated worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from kvcompile.integrations.vllm.prune_scheduler import PLANS
from kvcompile.schedule.trace import Arrival
from tests.integrations.prune_replays import BUDGET, Late, always, mixed, pruning_scheduler, run_of

BLOCK = 16
ALWAYS, NEVER = {"inline": "always"}, {"inline": "never"}
ORDERS = [False, True]
SCHEDULING = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


def watched(scheduler: Any) -> list[tuple[str, int, bool]]:
    """Of every prompt that ends: request, kept tokens, whether inline; what the worker is told of it is checked."""
    ended: list[tuple[str, int, bool]] = []
    schedule = scheduler.schedule

    def noted() -> Any:
        output = schedule()
        told = {new.req_id: new.block_ids[0] for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                told[request_id] = blocks[0]
        for request_id, step in getattr(output, PLANS).items():
            plan = step.plan
            if plan.inline:
                blocks = told[request_id]
                assert step.final and output.num_scheduled_tokens[request_id] == plan.tokens
                assert blocks[: plan.released] == [0] * plan.released and 0 not in blocks[plan.released :]
                assert len(blocks) == -(-plan.tokens // BLOCK)
            if step.final:
                ended.append((request_id, plan.kept, plan.inline))
        return output

    scheduler.schedule = noted
    return ended


@dataclass
class Served:
    """ended: see `watched`. together: the most requests that ran at a time."""

    scheduler: Any
    run: Any
    ended: list[tuple[str, int, bool]]
    together: int


def served(
    trace: list[Arrival],
    blocks: int,
    *,
    asynchronous: bool = False,
    word: Any = always,
    abort_every: int = 0,
    **fields: Any,
) -> Served:
    scheduler, config = pruning_scheduler(1 + blocks, asynchronous=asynchronous, **fields)
    ended, running = watched(scheduler), [0]

    def note(scheduler: Any) -> None:
        running.append(len(scheduler.running))

    run = run_of(trace, scheduler, config, word, abort_every=abort_every, after_step=note)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks
    assert not scheduler.pruning.plans and not scheduler.pruning.committed and not scheduler.pruning.policy._held
    for life in run.outcome.lives:
        assert life.aborted or life.tokens == life.arrival.output_tokens
    return Served(scheduler, run, ended, max(running))


def peak_of(run: Any) -> int:
    return max(blocks for _, blocks in run.outcome.blocks_used)


@SCHEDULING
@pytest.mark.parametrize("ordered", ORDERS, ids=["vllm's order", "by length"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("inline", ["auto", "always"])
@pytest.mark.parametrize("word", [always, Late(0.5)], ids=["at once", "late or never"])
def test_books_are_right_after_every_step_with_inline_two_phase_and_whole_prompts_together(
    word: Any, inline: str, caching: bool, ordered: bool, asynchronous: bool
) -> None:
    fields = {"ordered": ordered, "enable_prefix_caching": caching, "max_num_batched_tokens": 512}
    done = served(
        mixed(150, 3, 1000.0),
        60,
        asynchronous=asynchronous,
        word=word,
        abort_every=5,
        prune={"inline": inline},
        **fields,
    )
    ways = Counter(inline for *_, inline in done.ended)
    assert ways[False] > 3  # prompts of more than 512 tokens have no other way
    # Those that were preempted or left meanwhile do not count.
    assert 0 < done.scheduler.inline_prompts <= ways[True]
    assert done.scheduler.pruned_tokens >= BLOCK * done.scheduler.inline_prompts


@SCHEDULING
@pytest.mark.parametrize("ordered", ORDERS, ids=["vllm's order", "by length"])
def test_a_request_that_is_stored_inline_never_holds_more_than_it_keeps(asynchronous: bool, ordered: bool) -> None:
    fields = {"asynchronous": asynchronous, "ordered": ordered, "max_num_batched_tokens": 1024}
    for length in (80, 95, 96, 300, 1000):
        kept = length - (length - BUDGET) // BLOCK * BLOCK
        done = served([Arrival(0.0, length, 20, 20)], 200, prune=ALWAYS, **fields)
        # Of 19 new tokens keys and values are stored; asynchronously there is a page for one more.
        assert done.ended == [("0", kept, True)]
        assert peak_of(done.run) <= -(-(kept + 19 + asynchronous) // BLOCK)


def test_prompts_are_stored_in_two_phases_while_there_is_room_and_inline_when_there_is_not() -> None:
    trace = [Arrival(0.0, 320, 15, 15) for _ in range(6)]  # of 20 pages, of which 4 are kept, and one to decode
    fields = {"max_num_batched_tokens": 4096, "ordered": False}
    short = served(trace, 30, **fields)
    assert [inline for *_, inline in short.ended[:2]] == [False, True] and not short.run.outcome.preemptions
    assert not any(inline for *_, inline in served(trace, 200, **fields).ended)
    uncached = served(trace, 200, enable_prefix_caching=False, **fields)
    assert all(inline for *_, inline in uncached.ended) and peak_of(uncached.run) == 6 * (4 + 1)


def test_never_is_never() -> None:
    trace = [Arrival(0.0, 320, 30, 30) for _ in range(6)]
    done = served(trace, 30, prune=NEVER, enable_prefix_caching=False, max_num_batched_tokens=4096)
    assert len(done.ended) == 6 and not any(inline for *_, inline in done.ended)


@SCHEDULING
@pytest.mark.parametrize("ordered", ORDERS, ids=["vllm's order", "by length"])
def test_under_pressure_no_prompt_is_started_that_the_step_would_split(ordered: bool, asynchronous: bool) -> None:
    # Two prompts of 20 pages fit a step of 700 tokens and a third would be split; 30 pages hold no two whole ones.
    trace = [Arrival(0.0, 320, 8, 8) for _ in range(9)]
    fields = {"asynchronous": asynchronous, "ordered": ordered, "max_num_batched_tokens": 700}
    done = served(trace, 30, **fields)
    assert done.run.outcome.preemptions == 0
    assert len(done.run.outcome.admitted) == len(done.ended) == 9
    assert sum(inline for *_, inline in done.ended) >= 6
    assert done.together >= 4


def test_with_always_a_prompt_waits_for_a_step_with_room_but_no_longer_than_the_bound() -> None:
    # 400 tokens of 512 leave no room for another; one of 512 never finds a whole step while others decode.
    trace = [Arrival(0.0, length, 60, 60) for length in (400, 400, 512, 400)]
    done = served(trace, 400, prune=ALWAYS, ordered=False, max_num_batched_tokens=512)
    steps = {index: step for step, index in done.run.outcome.admitted}
    assert {name: inline for name, _, inline in done.ended} == {"0": True, "1": True, "2": False, "3": True}
    # scheduler.max_wait_batches is 2: held back in two steps, the second's and one more, it starts in the next.
    assert [steps[index] - steps[0] for index in range(4)] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("inline", "ways", "hits"), [("always", [True] * 3, [0] * 3), ("auto", [False] * 3, [0, 256, 256])]
)
def test_always_uses_no_hits_and_leaves_none_and_auto_uses_those_there_are(
    inline: str, ways: list[bool], hits: list[int]
) -> None:
    trace = [Arrival(9.0 * i, 320, 5, 5, prefix_group=1, prefix_tokens=320) for i in range(3)]
    scheduler, config = pruning_scheduler(
        200, asynchronous=False, prune={"inline": inline}, max_num_batched_tokens=1024
    )
    ended, found = watched(scheduler), []
    find = scheduler.kv_cache_manager.get_computed_blocks

    def noted(request: Any) -> Any:
        answer = find(request)
        found.append(answer[1])
        return answer

    scheduler.kv_cache_manager.get_computed_blocks = noted
    run_of(trace, scheduler, config, abort_every=0)
    assert [way for *_, way in ended] == ways
    assert found == hits


@SCHEDULING
def test_requests_stored_inline_are_preempted_and_come_back(asynchronous: bool) -> None:
    trace = [Arrival(0.0, 300, 400, 500) for _ in range(12)]
    fields = {"ordered": False, "prune": ALWAYS, "max_num_batched_tokens": 8192, "abort_every": 3}
    done = served(trace, 100, asynchronous=asynchronous, **fields)
    assert done.run.outcome.preemptions > 0
    assert len(done.ended) > len(trace) and all(inline for *_, inline in done.ended)


@SCHEDULING
def test_admission_counts_what_a_request_will_hold(asynchronous: bool) -> None:
    """Prompts of 20 pages of which 4 are kept, and one page more for each to decode, in one pool."""
    trace = [Arrival(0.0, 320, 16, 16) for _ in range(20)]
    fields = {"asynchronous": asynchronous, "max_num_batched_tokens": 8192}
    whole = served(trace, 86, prune={"budget_tokens": 4096}, **fields)
    inline = served(trace, 86, prune=ALWAYS, **fields)
    either = served(trace, 86, **fields)
    phased = served(trace, 86, prune=NEVER, **fields)
    assert all(done.run.outcome.preemptions == 0 for done in (whole, inline, either, phased))
    # In two phases each takes 20 pages for its prompt, and the next waits for those that it gives back.
    assert (whole.together, inline.together, either.together) == (4, 17, 17)
    assert phased.together >= 8
