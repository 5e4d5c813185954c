"""What pruning methods cost: the answers to one sample with its prompt pruned by each method to each budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from kvcompile.config import UsageError
from kvcompile.ops.prune import Method, select
from kvcompile.tools.evaluate_model import Prompt, PrunedModel
from kvcompile.tools.evaluate_samples import Sample
from kvcompile.tools.evaluate_scores import Scorer

FULL = "full"  # the system that keeps everything
_CHOICES = 16  # that one pass answers from: their kept keys and values of a layer are in memory together
R = TypeVar("R")


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


def budgets(texts: Iterable[str]) -> tuple[Budget, ...]:
    """Each once, in the order given. Raises UsageError for what is no budget."""
    return tuple(dict.fromkeys(map(parse_budget, texts)))


def outcomes(
    model: PrunedModel, sample: Sample, methods: Mapping[str, Method], budgets: Sequence[Budget]
) -> dict[tuple[str, str], Outcome]:
    """By (budget, system), systems being the methods' names and `FULL`. Raises UsageError as `by_system`."""

    def forced(prompt: Prompt, keep: torch.Tensor) -> list[Outcome]:
        first, nats = model.losses(prompt, keep, sample.later, sample.answer)
        pairs = torch.stack([first.double().mean(1), nats.double().mean(1)], 1).tolist()
        return [Outcome(*pair) for pair in pairs]

    return by_system(model, sample.prompt, methods, budgets, forced)


def by_system(
    model: PrunedModel,
    tokens: Sequence[int],
    methods: Mapping[str, Method],
    budgets: Sequence[Budget],
    answer: Callable[[Prompt, torch.Tensor], list[R]],
) -> dict[tuple[str, str], R]:
    """Answers to the prompt `tokens` by (budget, system), systems being the methods' names and `FULL`.

    answer: from a prompt and M choices of what is kept, int [L, M, G, K], one for each choice.
    Raises UsageError for a budget that is less than what a method always keeps.
    """
    prompt = model.prefill(tokens, max(method.window for method in methods.values()))
    scorers = {
        window: Scorer(prompt._replace(query=prompt.query[:, -window:]), model.scale, model.output_weights)
        for window in {method.window for method in methods.values()}
    }
    scores = {name: scorers[method.window].score(method) for name, method in methods.items()}
    everything = torch.arange(prompt.length, device=model.device).expand(*prompt.keys.shape[:2], -1)
    full = answer(prompt, everything.unsqueeze(1))[0]
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
        results: list[R] = []
        for begin in range(0, len(kept), _CHOICES):
            results += answer(prompt, torch.stack(kept[begin : begin + _CHOICES], 1))
        found.update({(budget.text, name): result for name, result in zip(methods, results, strict=True)})
    return found
