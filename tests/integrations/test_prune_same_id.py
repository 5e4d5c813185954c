"""An id that has ended and comes again, as VLLM_DISABLE_REQUEST_ID_RANDOMIZATION allows: the second is not the first.

With asynchronous scheduling the worker's word of the first may come when the second has been admitted. What vLLM makes
of the first one's token then is its own affair; here the step has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcompile.integrations.vllm import replay
from kvcompile.integrations.vllm.integrity import check_integrity
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS
from kvcompile.integrations.vllm.replay_outcome import Outcome
from kvcompile.schedule.trace import Arrival
from tests.integrations.prune_replays import pruning_scheduler
from tests.integrations.replays import STEP

LONG = Arrival(0.0, 300, 10, 10)
RELEASED = (300 - 64) // 16


def started(*, ordered: bool) -> tuple[Any, replay.Replay]:
    """A scheduler whose worker has been given the whole prompt of request 0 and has not answered."""
    scheduler, config = pruning_scheduler(90, asynchronous=True, ordered=ordered, max_num_batched_tokens=1024)
    run = replay.Replay(scheduler, config, STEP)
    run.outcome = Outcome.of([LONG])
    run._add(0, LONG)
    run._schedule()
    return scheduler, run


def answer(run: replay.Replay, *, sampled: bool = True) -> None:
    """The worker has done the oldest step and says so."""
    step = run.in_flight.popleft()
    done = {name: told.plan.epoch for name, told in getattr(step.output, PLANS).items() if told.final}
    update = run.scheduler.update_from_output

    def told(output: Any, result: Any) -> Any:
        setattr(result, ACKNOWLEDGED, done)
        return update(output, result)

    run.scheduler.update_from_output = told
    run._finish(step if sampled else replace(step, samples=frozenset()))
    run.scheduler.update_from_output = update
    check_integrity(run.scheduler)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_late_word_of_a_request_that_was_aborted_releases_nothing_of_the_next_with_its_id(ordered: bool) -> None:
    scheduler, run = started(ordered=ordered)
    run.abort([0])
    run._add(0, LONG)
    run._schedule()
    answer(run, sampled=False)
    assert scheduler.released_blocks == 0 and not scheduler.pruning.committed and not scheduler.worker_refused
    answer(run)
    assert scheduler.released_blocks == RELEASED and scheduler.pruning.committed == {"0"}


@pytest.mark.parametrize("ordered", [True, False])
def test_one_that_waits_under_the_id_is_not_taken_for_the_one_that_ran(ordered: bool) -> None:
    scheduler, run = started(ordered=ordered)
    run.abort([0])
    run._add(0, LONG)
    answer(run, sampled=False)
    assert not scheduler.pruning.plans and not scheduler.pruning.committed and scheduler.released_blocks == 0
    run._schedule()
    answer(run)
    assert scheduler.released_blocks == RELEASED


def test_an_id_that_runs_is_refused_by_vllm_and_what_runs_goes_on() -> None:
    scheduler, run = started(ordered=True)
    with pytest.raises(AssertionError, match="duplicate request id"):
        run._add(0, replace(LONG, prompt_tokens=200))
    answer(run)
    assert scheduler.pruning.plans["0"].tokens == 300 and scheduler.released_blocks == RELEASED
