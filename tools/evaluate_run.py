"""Rounds of samples through the model, in one process or several that share them."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvcompile.ops.prune import Method
from kvcompile.tools.checkpoint_config import config_file
from kvcompile.tools.evaluate_model import PrunedModel
from kvcompile.tools.evaluate_pruned import Budget, Outcome, outcomes
from kvcompile.tools.evaluate_rounds import Rounds
from kvcompile.tools.evaluate_samples import Sample
from kvcompile.tools.evaluate_state import Kept

Values = Mapping[tuple[str, str], list[Outcome]]  # by (case, system), one per sample and in one order for all systems


@dataclass(frozen=True)
class Plan:
    """What is asked for; the time that `rounds` has is that of each process. kept: outcomes that are there."""

    model: Path
    device: str
    budgets: tuple[Budget, ...]
    methods: Mapping[str, Method]
    rounds: Rounds
    kept: Kept = field(default_factory=Kept)


def measure(plan: Plan, processes: int = 1) -> Values:
    """Outcomes of the cases "last, 50 %" (position, budget) and "last, 50 %, single" (of one task alone).

    Raises UsageError for a prompt that the model has no positions for, or that has no room for what is to be hidden.
    """
    config_file(plan.model)
    if processes == 1:
        return _measure(plan)
    seeds = plan.rounds.seeds
    parts = [
        replace(plan, rounds=replace(plan.rounds, seeds=seeds[index::processes]))
        for index in range(min(processes, len(seeds)))
    ]
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(len(parts), context) as pool:
        found = list(pool.map(_measure, parts))
    merged: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for values in found:
        for key, part in values.items():
            merged[key] += part
    return merged


def _measure(plan: Plan) -> Values:
    model = PrunedModel(plan.model, plan.device)
    values: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for samples in plan.rounds.each(
        model.tokenizer,
        model.max_tokens,
        lambda sample: len(sample.prompt) + len(sample.later) + len(sample.answer),
        "the model has positions for",
    ):
        for sample in samples:
            for budget, system, *figures in plan.kept.of(sample, partial(_outcomes, model, plan, sample)):
                case, outcome = f"{sample.position}, {budget}", Outcome(*figures)
                values[case, system].append(outcome)
                values[f"{case}, {sample.task}", system].append(outcome)
    return values


def _outcomes(model: PrunedModel, plan: Plan, sample: Sample) -> list[list[Any]]:
    """[budget, system, rank1, nll] of each."""
    found = outcomes(model, sample, plan.methods, plan.budgets)
    return [[*key, *outcome] for key, outcome in found.items()]
