"""Who answers the questions of an evaluation: served models, or a checkpoint's in this process, pruned by methods."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvcompile.config import PruneConfig, UsageError
from kvcompile.tools import evaluate_endpoint, evaluate_methods, evaluate_served, evaluate_state, evaluate_tokenizer
from kvcompile.tools.evaluate_endpoint import Question
from kvcompile.tools.evaluate_model import PrunedModel
from kvcompile.tools.evaluate_pruned import FULL, Budget, budgets, by_system
from kvcompile.tools.evaluate_state import Kept

Answers = dict[tuple[str, str], list[str]]  # by (budget, system), one for each question in their order


class Answering(NamedTuple):
    """limit: tokens of prompt and answer together, None if it is not known. against: whom the others are compared with.

    check: raises UsageError for questions that could not be asked. kept: answers that `ask` asks for no more.
    """

    ask: Callable[[Sequence[Question]], Answers]
    check: Callable[[Sequence[Question]], None]
    tokenizer: Any
    limit: int | None
    systems: list[str]
    against: str
    kept: Kept


def served(args: argparse.Namespace) -> Answering:
    """The endpoints that are named. Raises UsageError for what is wrong with them, or with a budget."""
    concurrency, budgeted = evaluate_endpoint.concurrency(args), budgets(args.budget or ())
    endpoints = evaluate_endpoint.connect(args)
    evaluate_served.check_budgets(endpoints, budgeted)
    systems = evaluate_served.systems(endpoints, budgeted)
    against, tokenizer = _against(args.against, systems), evaluate_tokenizer.load(args.model, endpoints)
    kept = evaluate_endpoint.kept(args, endpoints)
    return Answering(
        ask=lambda questions: evaluate_served.answers(endpoints, questions, budgeted, concurrency, kept),
        check=lambda questions: None,  # a server says by itself what it does not take
        tokenizer=tokenizer,
        limit=evaluate_endpoint.limit(endpoints),
        systems=systems,
        against=against,
        kept=kept,
    )


def local(args: argparse.Namespace) -> Answering:
    """The model in the folder, unpruned and by every method. Raises UsageError for what is wrong with what is asked."""
    methods = evaluate_methods.methods(args.method or [PruneConfig().method])
    budgeted, systems = budgets(args.budget or ("50%", "25%")), [FULL, *methods]
    against, kept = _against(args.against, systems), evaluate_state.opened(args)
    model = PrunedModel(args.model, evaluate_methods.device(args.device))

    def check(questions: Sequence[Question]) -> None:
        least = max(method.always_kept for method in methods.values())
        for budget in budgeted:
            _check_budget(budget, questions, least)

    def ask(questions: Sequence[Question]) -> Answers:
        found: Answers = {}
        for question in questions:
            for budget, system, text in kept.of(question, partial(answer, question)):
                found.setdefault((budget, system), []).append(text)
        return found

    def answer(question: Question) -> list[list[str]]:
        generate = partial(model.generate, most=question.max_tokens, stop=question.stop_token_ids)
        answers = by_system(model, _ids(model.tokenizer, question), methods, budgeted, generate)
        return [[*key, model.tokenizer.decode(ids, skip_special_tokens=True)] for key, ids in answers.items()]

    return Answering(ask, check, model.tokenizer, model.max_tokens, systems, against, kept)


def _against(asked: str | None, systems: Sequence[str]) -> str:
    """The system of paired differences: the first unless another is named."""
    if asked not in (None, *systems):
        raise UsageError(f"--against {asked}: allowed are {'; '.join(systems)}")
    return asked or systems[0]


def _check_budget(budget: Budget, questions: Sequence[Question], least: int) -> None:
    for question in questions:
        kept = budget.of(question.tokens)
        if kept < min(question.tokens, least):
            raise UsageError(
                f"--budget {budget.text}: {kept} of a prompt's {question.tokens} tokens; the methods always keep "
                f"{least}; give a larger budget"
            )


def _ids(tokenizer: Any, question: Question) -> list[int]:
    return evaluate_tokenizer.chat(tokenizer, question.prompt) if question.chat else list(question.prompt)
