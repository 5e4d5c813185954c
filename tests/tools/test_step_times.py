"""Step times: as `--step-time` gives them, and fitted to steps whose times are known."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple

import pytest

from kvcompile.schedule.trace import H200_LLAMA_8B, Step, StepTime
from kvcompile.tools import step_times


def _steps(count: int, seed: int = 0) -> list[Step]:
    """As an engine makes them: mostly decoding, some with prompts, some with prompts alone."""
    rng = random.Random(seed)
    steps = []
    for number in range(count):
        requests = rng.randint(1, 128) if number % 9 else 0
        prompts = rng.randint(16, 8192) if number % 3 == 0 else 0
        steps.append(Step(prompts, requests, 400 * requests + prompts + rng.randint(0, 20_000)))
    return steps


def _timed(steps: list[Step], time: StepTime, noise: float = 0.0) -> list[tuple[Step, float]]:
    rng = random.Random(1)
    return [(step, time.seconds(step) * (1 + rng.uniform(-noise, noise))) for step in steps]


def _squares(time: StepTime, timed: list[tuple[Step, float]]) -> float:
    return sum((time.seconds(step) / seconds - 1) ** 2 for step, seconds in timed)


def test_the_figures_are_in_the_units_that_the_help_says() -> None:
    time = step_times.parse("2,3,4,5")
    assert astuple(time) == pytest.approx((2e-3, 3e-6, 4e-6, 5e-9))
    assert step_times.in_units(time) == pytest.approx((2, 3, 4, 5))
    assert step_times.written(H200_LLAMA_8B) == "6.1,17.1,6.6,31"
    assert astuple(step_times.parse(step_times.written(H200_LLAMA_8B))) == pytest.approx(astuple(H200_LLAMA_8B))


@pytest.mark.parametrize("time", [H200_LLAMA_8B, StepTime(2e-2, 1e-7, 3e-4, 2e-10), StepTime(1e-4, 2e-4, 0.0, 0.0)])
def test_steps_of_a_known_time_give_it_back(time: StepTime) -> None:
    timed = _timed(_steps(300), time)
    assert astuple(step_times.fit(timed)) == pytest.approx(astuple(time), rel=1e-6, abs=1e-12)
    assert step_times.error(time, timed) == 0
    assert step_times.error(step_times.fit(timed), timed) < 1e-6


def test_scattered_steps_give_it_nearly() -> None:
    timed = _timed(_steps(3000), H200_LLAMA_8B, noise=0.05)
    assert astuple(step_times.fit(timed)) == pytest.approx(astuple(H200_LLAMA_8B), rel=0.05)
    assert 0.02 < step_times.error(H200_LLAMA_8B, timed) < 0.03


def test_what_would_be_negative_is_zero_and_the_others_are_the_best_without_it() -> None:
    # A step is faster by 1 ms for each request that it decodes: the best figure without a sign would be negative.
    timed = [(Step(100 * n, m, 0), 0.1 + 1e-5 * 100 * n - 1e-3 * m) for n in range(10) for m in range(1, 10)]
    found = step_times.fit(timed)
    assert (found.per_decode_request_s, found.per_context_token_s) == (0, 0)
    least = _squares(found, timed)
    for base, prefill, decode in itertools.product((-1e-4, 0, 1e-4), (-1e-7, 0, 1e-7), (0, 1e-6)):
        other = StepTime(found.base_s + base, found.per_prefill_token_s + prefill, decode, 0)
        assert _squares(other, timed) > least or other == found


def test_what_never_occurs_costs_nothing() -> None:
    timed = _timed([Step(0, n, 50 * n * n) for n in range(1, 60)], H200_LLAMA_8B)
    expected = (H200_LLAMA_8B.base_s, 0, H200_LLAMA_8B.per_decode_request_s, H200_LLAMA_8B.per_context_token_s)
    assert astuple(step_times.fit(timed)) == pytest.approx(expected, rel=1e-6)


def test_a_fit_to_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no step was timed"):
        step_times.fit([])
