"""`kvcompile evaluate retrieval --endpoint URL`: generated questions to served models, by what their answers contain.

A server gives text, not ranks of given tokens: the score of an answer is the share of the wanted texts that it
contains, whatever the case and the white space, as in RULER. The prompt ends where the reply begins. A question in a
later turn is a request that holds the whole chat, as chat clients send it, and pruning sees its end.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_answering, evaluate_methods, evaluate_report
from kvcompile.tools.evaluate_endpoint import Question
from kvcompile.tools.evaluate_report import Drawing, Table
from kvcompile.tools.evaluate_retrieval_options import ANSWER_TOKENS, rounds
from kvcompile.tools.evaluate_samples import Sample
from kvcompile.tools.evaluate_statistics import compared
from kvcompile.tools.evaluate_tasks import TASKS

_UNSCORED = "continuation"  # any continuation is as good: a text of a server has no score
METRIC = "contained"


def run(args: argparse.Namespace) -> int:
    """0 with tables on standard output."""
    evaluate_methods.refuse(args, "processes")
    if _UNSCORED in (args.task or ()):
        raise UsageError(f"--task {_UNSCORED} has no answer that a served text could contain; leave --endpoint out")
    most = ANSWER_TOKENS if args.answer_tokens is None else args.answer_tokens
    if most < 1:
        raise UsageError(f"--answer-tokens {most}; allowed is 1 or more")
    asked = rounds(args, tuple(task for task in TASKS if task != _UNSCORED))
    answering = evaluate_answering.served(args)
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for samples in asked.each(
        answering.tokenizer, answering.limit, lambda sample: len(sample.asked) + most, "the server takes"
    ):
        questions = [Question(sample.asked, len(sample.asked), most) for sample in samples]
        for (budget, system), texts in answering.ask(questions).items():
            for sample, text in zip(samples, texts, strict=True):
                case, score = f"{sample.position}, {budget}", contained(text, sample)
                values[case, system].append(score)
                values[f"{case}, {sample.task}", system].append(score)
    rows = compared(values, METRIC, "share", answering.against)
    whole = [each for each in rows if each["case"].count(",") == 1]  # of all tasks together
    count = min(each["runs"] for each in whole)
    title = f"share of the wanted texts in the answer; {count} samples a column, mean and 95 % interval"
    tables = [Table(title, whole, METRIC)]
    if len(answering.systems) > 1:
        tables.append(Table(f"paired difference from {answering.against} in the {title}", whole, "difference"))
    evaluate_report.publish(args, "quality-served", rows, tables, Drawing(title, whole, METRIC), answering.kept)
    return 0


def contained(text: str, sample: Sample) -> float:
    """The share of the sample's wanted texts that `text` contains, whatever the case and the white space."""
    said = _plain(text)
    return sum(_plain(wanted) in said for wanted in sample.wanted) / len(sample.wanted)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
