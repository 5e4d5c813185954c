"""Step times of the simulated worker: as a user writes them, and fitted to steps that were timed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch

from kvcompile.config import UsageError, shown
from kvcompile.schedule.trace import Step, StepTime

UNITS = ("ms a step", "us a prompt token", "us a decoding request", "ns a token of context")
_PER_SECOND = (1e3, 1e6, 1e6, 1e9)


def parse(text: str) -> StepTime:
    """The step time that `--step-time` gives, in `UNITS`."""
    try:
        base, prefill, decode, context = (float(part) for part in text.split(","))
    except ValueError:
        base = prefill = decode = context = -1.0
    if not (base > 0 and prefill >= 0 and decode >= 0 and context >= 0):
        raise UsageError(f"--step-time is {shown(text)}; allowed are four numbers: {', '.join(UNITS)}")
    return StepTime(base * 1e-3, prefill * 1e-6, decode * 1e-6, context * 1e-9)


def in_units(time: StepTime) -> tuple[float, ...]:
    """The four figures in `UNITS`."""
    seconds = (time.base_s, time.per_prefill_token_s, time.per_decode_request_s, time.per_context_token_s)
    return tuple(value * per for value, per in zip(seconds, _PER_SECOND, strict=True))


def written(time: StepTime) -> str:
    """The figures as `--step-time` takes them, to four digits."""
    return ",".join(f"{value:.4g}" for value in in_units(time))


def fit(timed: Sequence[tuple[Step, float]]) -> StepTime:
    """The step time with the least squared error on timed steps (step, seconds), of those without a negative figure.

    Errors are in shares of a step's time: what disturbs a step does so in proportion, and a few long prompts would
    otherwise decide what all the short steps are said to take. Raises ValueError if no step was timed.

    The least of all such is the unconstrained one of the figures that are not zero in it, so every choice of those is
    tried: with four figures there are 15, and each has a solution in closed form.
    """
    if not timed:
        raise ValueError("no step was timed")
    seconds = torch.tensor([[seconds] for _, seconds in timed], dtype=torch.float64)
    columns = torch.tensor([[1, *step] for step, _ in timed], dtype=torch.float64) / seconds
    # Columns of like size, or the solver takes the small ones for rounding errors. A column of zeros stays one.
    sizes = columns.norm(dim=0)
    sizes[sizes == 0] = 1
    columns, ones = columns / sizes, torch.ones_like(seconds)
    best, least = torch.zeros(4, dtype=torch.float64), float(len(timed))
    for count in range(1, 5):
        for chosen in itertools.combinations(range(4), count):
            part = columns[:, chosen]
            found = torch.linalg.lstsq(part, ones, driver="gelsd").solution
            squares = (part @ found - ones).square().sum().item()
            if found.min() >= 0 and squares < least:
                best, least = torch.zeros(4, dtype=torch.float64), squares
                best[list(chosen)] = found[:, 0]
    return StepTime(*(best / sizes).tolist())


def error(time: StepTime, timed: Sequence[tuple[Step, float]]) -> float:
    """By what share of its time the median step is missed."""
    return statistics.median(abs(time.seconds(step) / seconds - 1) for step, seconds in timed)
