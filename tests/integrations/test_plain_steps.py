"""Plain decode steps leave everything as vLLM's own would: outputs, requests, blocks and queues, after every step."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams

from kvcompile.integrations.vllm import compat_sources, replay
from kvcompile.integrations.vllm.plain_steps import PLAIN, _is_plain
from kvcompile.schedule.trace import Arrival
from tests.integrations import prune_replays
from tests.integrations.replays import STEP, pressing, scheduler_of
from tests.integrations.step_records import same_as_vllms


@pytest.fixture(autouse=True)
def _equal_hashes(monkeypatch):
    """vLLM begins each chain of block hashes at random, or where this says."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


SYNC_OR_NOT = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])


def _trace(seed: int, requests: int = 50) -> list[Arrival]:
    rng = random.Random(seed)
    lengths = [(40 + rng.randrange(200), rng.randint(1, 70), rng.choice([0, 32, 64])) for _ in range(requests)]
    # The limit ends some of them, a stop token the others.
    return [
        Arrival(i * rng.choice([0.0, 0.05, 0.4]), prompt, out, rng.choice([out, 80]), rng.randrange(3) * 131, shared)
        for i, (prompt, out, shared) in enumerate(lengths)
    ]


def _serve(trace: list[Arrival], aborts: dict[int, int] | None = None, after_step: Any = None) -> Any:
    ordered = sorted(trace, key=lambda arrival: arrival.time_s)

    def serve(scheduler: Any, config: Any) -> None:
        replay.Replay(scheduler, config, STEP, aborts=aborts, after_step=after_step).run(ordered)

    return serve


@SYNC_OR_NOT
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
@pytest.mark.parametrize("blocks", [600, 100], ids=["enough blocks", "few blocks"])
def test_a_plain_step_says_and_leaves_what_vllm_would(asynchronous, caching, blocks):
    rng = random.Random(3)
    aborts = {index: rng.randint(1, 60) for index in range(0, 50, 5)}
    options = {"horizon_steps": 1, "reserve_ratio": 0}

    def make() -> Any:
        return scheduler_of(
            blocks, options=options, asynchronous=asynchronous, enable_prefix_caching=caching, max_num_seqs=24
        )

    ours = same_as_vllms(make, _serve(_trace(1), aborts))
    assert ours.plain_steps > 50


@SYNC_OR_NOT
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
def test_so_it_does_while_the_first_in_line_is_refused_again_and_again(asynchronous, pruned):
    waiting = []

    def make() -> Any:
        if pruned:
            return prune_replays.pruning_scheduler(70, asynchronous=asynchronous)
        return scheduler_of(100, options={"horizon_steps": 40, "reserve_ratio": 0.1}, asynchronous=asynchronous)

    def serve(scheduler: Any, config: Any) -> None:
        schedule = scheduler.schedule

        def watched() -> Any:
            output = schedule()
            waiting.append(bool(getattr(output, PLAIN, False) and scheduler.waiting))
            return output

        scheduler.schedule = watched
        _serve(_trace(6, 40), {3: 20, 11: 5, 12: 30})(scheduler, config)

    same_as_vllms(make, serve)
    assert sum(waiting) > 5


@SYNC_OR_NOT
def test_so_it_does_where_requests_are_preempted_and_have_priorities(asynchronous):
    def make() -> Any:
        return scheduler_of(
            90,
            options={"horizon_steps": 1, "reserve_ratio": 0},
            asynchronous=asynchronous,
            scheduling_policy="priority",
        )

    rng = random.Random(4)
    trace = [dataclasses.replace(arrival, priority=rng.randrange(3)) for arrival in pressing(30)]
    assert same_as_vllms(make, _serve(trace)).plain_steps > 50


@SYNC_OR_NOT
@pytest.mark.parametrize("inline", ["never", "auto"])
def test_so_it_does_where_requests_are_pruned(asynchronous, inline):
    def make() -> Any:
        return prune_replays.pruning_scheduler(150, asynchronous=asynchronous, prune={"inline": inline})

    def serve(scheduler: Any, config: Any) -> None:
        prune_replays.run_of(sorted(_trace(2, 30), key=lambda a: a.time_s), scheduler, config)

    assert same_as_vllms(make, serve).plain_steps > 50


@SYNC_OR_NOT
def test_so_it_does_where_the_prefix_cache_is_reset_with_all_that_runs(asynchronous):
    def reset(done: replay.Replay) -> None:
        if done.outcome.steps in (30, 77):
            done.scheduler.reset_prefix_cache(reset_running_requests=True)

    def make() -> Any:
        return scheduler_of(600, asynchronous=asynchronous)

    assert same_as_vllms(make, _serve(_trace(5, 30), after_step=reset)).plain_steps > 50


@SYNC_OR_NOT
def test_so_it_does_for_the_second_model_runner(asynchronous):
    def make() -> Any:
        scheduler, config = scheduler_of(600, asynchronous=asynchronous)
        scheduler.use_v2_model_runner = True
        return scheduler, config

    assert same_as_vllms(make, _serve(_trace(7, 20))).plain_steps > 50


def _with(requests: Any = None, results: Any = None, **fields: Any) -> Any:
    """Makes schedulers whose requests and results are changed by these before they see them."""

    def make() -> Any:
        scheduler, config = scheduler_of(600, **fields)
        add, update = scheduler.add_request, scheduler.update_from_output
        if requests:
            scheduler.add_request = lambda request: (requests(request.sampling_params), add(request))
        if results:
            scheduler.update_from_output = lambda output, result: (results(result), update(output, result))[1]
        return scheduler, config

    return make


@SYNC_OR_NOT
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"stop_token_ids": [], "_eos_token_id": 1}, "stop"),
        ({"stop_token_ids": [1], "min_tokens": 30}, "stop"),
        ({"stop_token_ids": [], "repetition_detection": RepetitionDetectionParams(3, 1, 9)}, "repetition"),
        ({"stop_token_ids": []}, "length"),
    ],
    ids=["eos", "not before", "repetition", "longest"],
)
def test_a_request_ends_where_and_as_vllm_ends_it(asynchronous, end, reason):
    ended = []

    def change(sampling: Any) -> None:
        for name, value in end.items():
            setattr(sampling, name, value)
        sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)  # as vLLM demands

    def serve(scheduler: Any, config: Any) -> None:
        update = scheduler.update_from_output

        def watched(output: Any, result: Any) -> Any:
            plain, outputs = getattr(output, PLAIN, False), update(output, result)
            said = [one for each in outputs.values() for one in each.outputs if one.finish_reason is not None]
            ended.extend(str(one.finish_reason) for one in said if plain)
            return outputs

        scheduler.update_from_output = watched
        _serve(_trace(8, 20))(scheduler, config)

    same_as_vllms(_with(change, asynchronous=asynchronous, max_model_len=256), serve)
    assert ended.count(reason) > 5


class _Logprobs:
    """Stands for those of a step's tokens."""

    def slice_request(self, index: int, tokens: int) -> Any:
        return index, tokens


@pytest.mark.parametrize(
    "found", [{"logprobs": _Logprobs()}, {"num_nans_in_logits": {"1": 3, "4": 2}}], ids=["log-probabilities", "nans"]
)
def test_what_a_result_has_beyond_tokens_is_told_as_by_vllm(found):
    def request(sampling: Any) -> None:
        sampling.logprobs = 1

    def result(made: Any) -> None:
        for name, value in found.items():
            setattr(made, name, value)

    assert same_as_vllms(_with(request, result), _serve(_trace(9, 10))).plain_steps > 20


def test_only_a_request_that_needs_nothing_but_its_next_token_is_plain():
    nothing = dict.fromkeys(("structured_output_request", "lora_request", "pooling_params"))
    nothing |= {"mm_features": [], "spec_token_ids": [], "resumable": False}
    assert _is_plain(SimpleNamespace(**nothing))
    for name in nothing:
        assert not _is_plain(SimpleNamespace(**nothing | {name: [7]})), name


def test_what_a_step_has_beyond_plain_is_left_to_vllm():
    scheduler, config = scheduler_of(600)
    seen = []
    schedule = scheduler.schedule

    def watched() -> Any:
        output = schedule()
        seen.append((getattr(output, PLAIN, False), bool(output.scheduled_new_reqs), output.total_num_scheduled_tokens))
        return output

    scheduler.schedule = watched
    _serve([Arrival(0.0, 40, 30, 30), Arrival(0.1, 300, 30, 30)])(scheduler, config)
    assert {plain for plain, _, _ in seen} == {True, False}
    assert not any(plain and (new or tokens > 2) for plain, new, tokens in seen)


def test_sources_that_differ_from_those_that_are_known_turn_plain_steps_off(monkeypatch):
    said = []
    monkeypatch.setattr(compat_sources, "_SCHEDULER", "of another version")
    monkeypatch.setattr(compat_sources.logger, "warning", said.append)
    scheduler, config = scheduler_of(500)
    _serve(pressing(5))(scheduler, config)
    assert scheduler.plain_steps == 0
    assert said == ["this vLLM's scheduler is not that of 0.23.0: decode steps are scheduled by its own, slower code"]
