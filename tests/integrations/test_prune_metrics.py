"""What a scheduler that prunes counts: tokens and blocks given up, refusals once each, what a request ends with."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcompile.integrations.vllm import metrics, prune_scheduler
from kvcompile.integrations.vllm.prune_scheduler import FAILURES
from kvcompile.schedule.trace import Arrival
from tests.integrations.prune_replays import BUDGET, Word, always, pruning_scheduler, run_of

LENGTHS = (40, 79, 80, 149, 300, 690)
RELEASED = {i: (n - BUDGET) // 16 for i, n in enumerate(LENGTHS)}


class Counts:
    """All that has come out of a scheduler."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.resident: list[float] = []

    def take(self, outputs: dict[int, Any]) -> dict[int, Any]:
        for each in outputs.values():
            taken = metrics.receive(each.scheduler_stats) or {"counts": {}, "observed": {}}
            for name, by in taken["counts"].items():
                self.counted.update({f"{name} {label}".strip(): n for label, n in by.items()})
            self.resident += taken["observed"].get("request_resident_kv_tokens", [])
        return outputs


def replayed(
    *,
    asynchronous: bool = False,
    word: Word = always,
    ask: Callable[[Any], None] = lambda request: None,
    trace: list[Arrival] | None = None,
    abort_every: int = 0,
    blocks: int = 200,
    failures: int = 0,
    **prune: Any,
) -> tuple[Counts, Any]:
    """ask: changes requests before they come. failures: of scoring, that the worker reports in each step."""
    scheduler, config = pruning_scheduler(blocks, asynchronous=asynchronous, prune=prune, max_num_seqs=8)
    counts, update, add = Counts(), scheduler.update_from_output, scheduler.add_request

    def told(output: Any, result: Any) -> Any:
        setattr(result, FAILURES, failures)
        return counts.take(update(output, result))

    def asked(request: Any) -> None:
        ask(request)
        add(request)

    scheduler.update_from_output, scheduler.add_request = told, asked
    trace = trace or [Arrival(0.0, length, 10, 10) for length in LENGTHS]
    return counts, run_of(trace, scheduler, config, word, abort_every=abort_every)


def silent(done: dict[str, int]) -> dict[str, int]:
    return {}


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Lines that the scheduler logs; vLLM's loggers pass none on, so that caplog would see nothing."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    prune_scheduler.logger.addHandler(handler)
    yield lines
    prune_scheduler.logger.removeHandler(handler)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_tokens_blocks_and_what_each_request_holds_at_its_end(asynchronous: bool, said: list[str]) -> None:
    counts, run = replayed(asynchronous=asynchronous)
    released = sum(max(0, n) for n in RELEASED.values())
    assert counts.counted == {
        "pruned_tokens two_phase": 16 * released,
        "prune_reclaimed_blocks two_phase": released,
    }
    # The last token is sampled and not computed.
    held = [n - 16 * max(0, RELEASED[i]) + 10 - 1 for i, n in enumerate(LENGTHS)]
    assert sorted(counts.resident) == sorted(held)
    assert not said


def test_prompts_that_are_stored_inline_are_told_apart() -> None:
    # A step computes 256 tokens: of the two longest prompts never all.
    trace = [Arrival(float(i), length, 10, 10) for i, length in enumerate(LENGTHS)]
    counts, _ = replayed(inline="always", trace=trace)
    inline, later = RELEASED[2] + RELEASED[3], RELEASED[4] + RELEASED[5]
    assert counts.counted == {
        "prune_inline_prompts": 2,
        "pruned_tokens inline": 16 * inline,
        "prune_reclaimed_blocks inline": inline,
        "pruned_tokens two_phase": 16 * later,
        "prune_reclaimed_blocks two_phase": later,
    }
    assert sorted(counts.resident) == sorted(n - 16 * max(0, RELEASED[i]) + 9 for i, n in enumerate(LENGTHS))


def test_failures_that_the_worker_reports_are_counted() -> None:
    counts, run = replayed(failures=2, trace=[Arrival(0.0, 40, 3, 3)])
    # With each token, and with the step in which the worker hears that the request has ended.
    assert counts.counted == {"prune_scoring_failures": 2 * (3 + 1)}


def test_a_request_that_is_preempted_is_observed_once_at_its_end() -> None:
    counts, run = replayed(trace=[Arrival(0.0, 300, 400, 500) for _ in range(12)], blocks=120)
    assert run.outcome.preemptions > 0
    assert len(counts.resident) == 12
    assert (
        counts.counted["pruned_tokens two_phase"] > 12 * 16 * RELEASED[4]
    )  # those that began anew once more, and of more


def test_who_goes_away_is_observed_with_what_it_held_and_is_no_refusal() -> None:
    counts, _ = replayed(abort_every=2)
    assert len(counts.resident) == len(LENGTHS)
    assert set(counts.counted) == {"pruned_tokens two_phase", "prune_reclaimed_blocks two_phase"}


def test_prompts_that_are_to_be_looked_at_closely_are_counted_once_each_and_said_once(said: list[str]) -> None:
    def ask(request: Any) -> None:
        request.sampling_params.prompt_logprobs = 1

    # A pool in which requests wait, and are judged more than once.
    counts, _ = replayed(ask=ask, blocks=60)
    # Those of 40 and 79 tokens would have stayed whole anyway.
    assert counts.counted == {"prune_refusals prompt_logprobs": 4}
    assert sorted(counts.resident) == [n + 9 for n in LENGTHS]
    (line,) = said
    assert "it asks for the log-probabilities of its prompt" in line


def test_what_a_request_wishes_itself_is_no_refusal(said: list[str]) -> None:
    def ask(request: Any) -> None:
        request.sampling_params.extra_args = {"kv_prune": False}

    counts, _ = replayed(ask=ask)
    assert not counts.counted and not said


def test_a_wish_that_is_not_allowed_is_counted_and_the_first_of_them_is_told(said: list[str]) -> None:
    def ask(request: Any) -> None:
        request.sampling_params.extra_args = {"kv_budget_tokens": int(request.request_id)}

    counts, _ = replayed(ask=ask)
    assert counts.counted == {"prune_refusals wrong_request": 4}
    (line,) = said
    assert "kv_budget_tokens is " in line and "allowed are" in line


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_worker_that_says_nothing_is_counted_for_each_request(asynchronous: bool, said: list[str]) -> None:
    counts, _ = replayed(asynchronous=asynchronous, word=silent)
    assert counts.counted == {"prune_refusals not_acknowledged": 4}
    assert sorted(counts.resident) == [n + 9 for n in LENGTHS]
    (line,) = said
    assert "the worker did not say" in line
