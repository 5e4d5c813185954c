"""The same questions to every endpoint and at every budget: what they answer, by budget and system.

Systems are the endpoints' names; of one that prunes and is asked with budgets, also "NAME, whole": nothing pruned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_endpoint import Endpoint, Question
from kvcompile.tools.evaluate_pruned import Budget

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
    endpoints: Sequence[Endpoint], questions: Sequence[Question], budgets: Sequence[Budget], concurrency: int
) -> dict[tuple[str, str], list[str]]:
    """By (budget, system), one answer for each question in their order.

    Without budgets the one budget is `AS_SERVED`. What no budget changes is asked once and stands at each of them.
    """
    found = {}
    for endpoint in endpoints:
        if not budgets:
            found[AS_SERVED, endpoint.name] = _answers(endpoint, questions, [None] * len(questions), concurrency)
            continue
        keep_all = 0 if endpoint.prunes else None
        unpruned = _answers(endpoint, questions, [keep_all] * len(questions), concurrency)
        for budget in budgets:
            if endpoint.prunes:
                kept = [_kept(budget, question.tokens) for question in questions]
                found[budget.text, whole(endpoint)] = unpruned
                found[budget.text, endpoint.name] = _answers(endpoint, questions, kept, concurrency)
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


def _answers(
    endpoint: Endpoint, questions: Sequence[Question], kept: Sequence[int | None], concurrency: int
) -> list[str]:
    return in_parallel(lambda asked: endpoint.answer(*asked), zip(questions, kept, strict=True), concurrency)
