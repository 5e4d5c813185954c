"""Rounds of samples through the model, in one process or several that share them."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.ops.prune import Method
from kvcompile.tools.checkpoint_config import config_file
from kvcompile.tools.evaluate_pruned import Budget, Outcome, outcomes
from kvcompile.tools.evaluate_samples import Generator, Sample

Values = Mapping[tuple[str, str], list[Outcome]]  # by (case, system), one per sample and in one order for all systems


@dataclass(frozen=True)
class Plan:
    """What is asked for. A round is one sample of each task, position and length; each seed is one round.

    texts: what facts are hidden in, None for generated sentences; seeds go through them in turn.
    seconds: no round begins after them, but each process has one.
    """

    model: Path
    device: str
    tasks: tuple[str, ...]
    positions: tuple[str, ...]
    lengths: tuple[int, ...]
    budgets: tuple[Budget, ...]
    methods: Mapping[str, Method]
    texts: tuple[str | None, ...]
    chat: bool
    seeds: tuple[int, ...]
    seconds: float | None


def measure(plan: Plan, processes: int = 1) -> Values:
    """Outcomes of the cases "last, 50 %" (position, budget) and "last, 50 %, single" (of one task alone).

    Raises UsageError for a prompt that the model has no positions for, or that has no room for what is to be hidden.
    """
    config_file(plan.model)
    if processes == 1:
        return _measure(plan)
    parts = [replace(plan, seeds=plan.seeds[index::processes]) for index in range(min(processes, len(plan.seeds)))]
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(len(parts), context) as pool:
        found = list(pool.map(_measure, parts))
    merged: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for values in found:
        for key, part in values.items():
            merged[key] += part
    return merged


def _measure(plan: Plan) -> Values:
    from kvcompile.tools.evaluate_model import PrunedModel

    model = PrunedModel(plan.model, plan.device)
    generators = [Generator(model.tokenizer, text, plan.chat) for text in plan.texts]
    values: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    start = time.monotonic()
    for index, seed in enumerate(plan.seeds):
        if plan.seconds is not None and index and time.monotonic() - start > plan.seconds:
            print(f"stopped after {index} of {len(plan.seeds)} rounds", file=sys.stderr)
            break
        for sample in _round(plan, generators[seed % len(generators)], seed, model.max_tokens):
            for (budget, system), outcome in outcomes(model, sample, plan.methods, plan.budgets).items():
                case = f"{sample.position}, {budget}"
                values[case, system].append(outcome)
                values[f"{case}, {sample.task}", system].append(outcome)
    return values


def _round(plan: Plan, generator: Generator, seed: int, max_tokens: int) -> Iterator[Sample]:
    for length in plan.lengths:
        if length > max_tokens:
            positions = f"{max_tokens}, question and answer included"
            raise UsageError(f"--length {length}: the model has positions for {positions}")
        for task in plan.tasks:
            for position in plan.positions:
                sample = generator.sample(task, position, length, seed)
                total = length + len(sample.later) + len(sample.answer)
                if total > max_tokens:
                    raise UsageError(
                        f"--length {length}: {total} tokens with question and answer; the model has positions for "
                        f"{max_tokens}"
                    )
                yield sample
