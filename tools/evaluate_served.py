"""The same questions to every endpoint and at every budget: what they answer, by budget and system.

Systems are the endpoints' names; of one that prunes and is asked with budgets, also "NAME, whole": nothing pruned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_endpoint import Endpoint, Question
from kvcompile.tools.evaluate_pruned import Budget
from kvcompile.tools.evaluate_state import Kept

AS_SERVED = "as served"  # the budget of requests that name none
T = TypeVar("T")
R = TypeVar("R")


def check_budgets(endpoints: Sequence[Endpoint], budgets: Sequence[Budget]) -> None:
    """Raise UsageError for budgets that no endpoint would follow."""
    if budgets and not any(endpoint.prunes for endpoint in endpoints):
        urls = " and ".join(endpoint.url for endpoint in endpoints)
        raise UsageError(
            f"--budget: {urls} do not prune, by their /metrics; serve with --compilation-config kvcompile, pruning "
            "not switched off, and log stats, or leave it out"
        )


def whole(endpoint: Endpoint) -> str:
    """The system of an endpoint that is told to prune nothing."""
    return f"{endpoint.name}, whole"


def systems(endpoints: Sequence[Endpoint], budgets: Sequence[Budget]) -> list[str]:
    """All systems of such a run; the first, which others are compared with, is the first endpoint's unpruned."""
    found = []
    for endpoint in endpoints:
        found += [whole(endpoint), endpoint.name] if budgets and endpoint.prunes else [endpoint.name]
    return found


def answers(
    endpoints: Sequence[Endpoint],
    questions: Sequence[Question],
    budgets: Sequence[Budget],
    concurrency: int,
    kept: Kept,
) -> dict[tuple[str, str], list[str]]:
    """By (budget, system), one answer for each question in their order; what is in `kept` is not asked again.

    Without budgets the one budget is `AS_SERVED`. What no budget changes is asked once and stands at each of them.
    """

    def ask(endpoint: Endpoint, budget: str, tokens: Sequence[int | None]) -> list[str]:
        def answer(asked: tuple[Question, int | None]) -> str:
            # By the name of the budget too: what comes to as many tokens is asked again, as it is without a record.
            return kept.of([endpoint.name, budget, *asked], partial(endpoint.answer, *asked))

        return in_parallel(answer, zip(questions, tokens, strict=True), concurrency)

    found = {}
    for endpoint in endpoints:
        if not budgets:
            found[AS_SERVED, endpoint.name] = ask(endpoint, AS_SERVED, [None] * len(questions))
            continue
        unpruned = ask(endpoint, whole(endpoint), [0 if endpoint.prunes else None] * len(questions))
        for budget in budgets:
            if endpoint.prunes:
                found[budget.text, whole(endpoint)] = unpruned
                tokens = [_kept(budget, each.tokens) for each in questions]
                found[budget.text, endpoint.name] = ask(endpoint, budget.text, tokens)
            else:
                found[budget.text, endpoint.name] = unpruned
    return found


def in_parallel(ask: Callable[[T], R], asked: Iterable[T], concurrency: int) -> list[R]:
    """`ask` of each, in order, so many at a time; after one that fails no other is begun."""
    failed = threading.Event()

    def unless_failed(each: T) -> R | None:
        try:
            return None if failed.is_set() else ask(each)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(unless_failed, asked))


def _kept(budget: Budget, tokens: int) -> int:
    """What `Endpoint.answer` is told: a prompt within the budget is whole, however short it is."""
    kept = budget.of(tokens)
    return kept if kept < tokens else 0
