"""What pruning methods cost: the answers to one sample with its prompt pruned by each method to each budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvcompile.config import UsageError
from kvcompile.ops.prune import Method, select
from kvcompile.tools.evaluate_model import Prompt, PrunedModel
from kvcompile.tools.evaluate_samples import Sample
from kvcompile.tools.evaluate_scores import Scorer

FULL = "full"  # the system that keeps everything
_CHOICES = 16  # that one pass answers from: their kept keys and values of a layer are in memory together


class Budget(NamedTuple):
    """Tokens of a prompt that are kept: a share of them, or a number."""

    text: str
    share: float | None = None
    tokens: int | None = None

    def of(self, length: int) -> int:
        """Kept tokens of a prompt of `length`: `length` if it is within the budget."""
        return min(length, self.tokens if self.share is None else math.ceil(self.share * length))


class Outcome(NamedTuple):
    """Share of the answer's tokens that rank first, and nats per token, teacher-forced."""

    rank1: float
    nll: float


def parse_budget(text: str) -> Budget:
    """`25%` or `544`. Raises UsageError for anything else."""
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return Budget(f"{text[:-1].strip()} %", share=share)
        elif int(text) >= 1:
            return Budget(f"{int(text)} tokens", tokens=int(text))
    except ValueError:
        pass
    raise UsageError(f"--budget: given {text!r}, allowed a share such as 25% or a number of tokens such as 544")


def outcomes(
    model: PrunedModel, sample: Sample, methods: Mapping[str, Method], budgets: Sequence[Budget]
) -> dict[tuple[str, str], Outcome]:
    """By (budget, system), systems being the methods' names and `FULL`.

    Raises UsageError for a budget that is less than what a method always keeps.
    """
    prompt = model.prefill(sample.prompt, max(method.window for method in methods.values()))
    scorers = {
        window: Scorer(prompt._replace(query=prompt.query[:, -window:]), model.scale, model.output_weights)
        for window in {method.window for method in methods.values()}
    }
    scores = {name: scorers[method.window].score(method) for name, method in methods.items()}
    everything = torch.arange(prompt.length, device=model.device).expand(*prompt.keys.shape[:2], -1)
    full = _answers(model, prompt, [everything], sample)[0]
    found = {}
    for budget in budgets:
        found[budget.text, FULL] = full
        keep = budget.of(prompt.length)
        if keep == prompt.length:
            found.update({(budget.text, name): full for name in methods})
            continue
        for name, method in methods.items():
            if keep < method.always_kept:
                raise UsageError(
                    f"--budget {budget.text}: {keep} of {prompt.length} tokens; {name} always keeps "
                    f"{method.always_kept}; give a larger budget"
                )
        kept = [select(scores[name], method, keep).view(*prompt.keys.shape[:2], -1) for name, method in methods.items()]
        results = _answers(model, prompt, kept, sample)
        found.update({(budget.text, name): result for name, result in zip(methods, results, strict=True)})
    return found


def _answers(model: PrunedModel, prompt: Prompt, kept: Sequence[torch.Tensor], sample: Sample) -> list[Outcome]:
    """One for each of `kept`, int [L, G, K]."""
    results = []
    for begin in range(0, len(kept), _CHOICES):
        choices = torch.stack(list(kept[begin : begin + _CHOICES]), 1)
        first, nats = model.losses(prompt, choices, sample.later, sample.answer)
        pairs = torch.stack([first.double().mean(1), nats.double().mean(1)], 1).tolist()
        results += [Outcome(*pair) for pair in pairs]
    return results
