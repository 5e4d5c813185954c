"""`kvcompile evaluate longbench`: LongBench or LongBench-E, from a local copy, by served models or in this process.

Prompts, truncation and metrics are the published ones; chats are in the model's own template. In this process prompts
are pruned by every method that is named, and nothing but the cache is rounded. The score of all
tasks together is the mean of the tasks' means. Scores are from 0 to 1; published tables show them times 100.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kvcompile.config import PruneConfig, UsageError
from kvcompile.tools import evaluate_answering, evaluate_endpoint, evaluate_methods, evaluate_report
from kvcompile.tools import evaluate_longbench_data as data
from kvcompile.tools.evaluate_answering import Answering
from kvcompile.tools.evaluate_endpoint import Question
from kvcompile.tools.evaluate_longbench_metrics import METRICS, NO_METRIC, score
from kvcompile.tools.evaluate_report import Drawing, Table
from kvcompile.tools.evaluate_statistics import macro_row, paired, row

SUMMARY = "LongBench or LongBench-E from a local copy: pruning methods against budget, or served models"
_ALL = "all tasks"
_TEMPLATE = 128  # tokens that a chat template may add to a prompt
Scores = dict[tuple[str, str, str], dict[str, list[float]]]  # by (bucket or "", budget, system): by task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a Hugging Face checkpoint; with --endpoint its tokenizer"
    )
    parser.add_argument(
        "data",
        type=Path,
        metavar="DATA",
        help="folder with the published TASK.jsonl, dataset2prompt.json and dataset2maxlen.json",
    )
    evaluate_endpoint.add_arguments(parser)
    evaluate_methods.add_arguments(parser, PruneConfig().method)
    parser.add_argument("--e", action="store_true", dest="extended", help="LongBench-E: TASK_e.jsonl, by length")
    parser.add_argument("--task", action="append", choices=(*METRICS, *NO_METRIC), help="(default: all in DATA)")
    parser.add_argument("--samples", type=int, metavar="N", help="only the first N of each task")
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens of a prompt, longer ones lose their middle (default: what the model takes)",
    )
    parser.add_argument(
        "--budget", action="append", help="kept: a share or tokens (default: 50%%, 25%%; served: the server's)"
    )
    parser.add_argument("--plain", action="store_true", help="no chat template, for a base model")
    parser.add_argument("--against", help="system of paired differences (default: the first, nothing pruned)")
    evaluate_report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 with tables on standard output."""
    evaluate_report.check(args)
    if args.samples is not None and args.samples < 1:
        raise UsageError(f"--samples {args.samples}; allowed is 1 or more")
    tasks = data.read_tasks(args.data, _names(args), args.extended, args.samples)
    answering = _answering(args)
    chat = not args.plain
    if chat and not getattr(answering.tokenizer, "chat_template", None):
        raise UsageError(f"{args.model}: the tokenizer has no chat template; give --plain for prompts without one")
    most = _max_length(args.max_length, answering.limit, max(task.max_tokens for task in tasks))
    questions = [
        [data.question(task, sample, answering.tokenizer, most, chat) for sample in task.samples] for task in tasks
    ]
    every = list(chain.from_iterable(questions))
    _check_room(most, every, answering.limit)
    answering.check(every)
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for task, asked in zip(tasks, questions, strict=True):
        for (budget, system), texts in answering.ask(asked).items():
            for sample, text in zip(task.samples, texts, strict=True):
                bucket = sample.bucket if args.extended else ""
                found = score(task.name, text, sample.answers, sample.classes)
                scores[bucket, budget, system][task.name].append(found)
        print(f"{task.name}: {len(task.samples)} samples", file=sys.stderr)
    rows = _rows(scores, answering.against)
    name = "LongBench-E" if args.extended else "LongBench"
    title = f"{name}, prompts of up to {most} tokens: score, mean and 95 % interval"
    tables = [Table(title, rows, "score", cases_down=True)]
    if len(answering.systems) > 1:
        tables.append(
            Table(f"paired difference from {answering.against}; {title}", rows, "difference", cases_down=True)
        )
    drawn = [each for each in rows if each["case"].startswith(_ALL)]
    evaluate_report.publish(args, name.lower(), rows, tables, Drawing(title, drawn, "score", before=""), answering.kept)
    return 0


def _answering(args: argparse.Namespace) -> Answering:
    if args.endpoint:
        evaluate_methods.refuse(args)
        return evaluate_answering.served(args)
    evaluate_endpoint.refuse_without(args, ())
    return evaluate_answering.local(args)


def _names(args: argparse.Namespace) -> list[str]:
    """The tasks that are measured; of those in DATA that cannot be, a line says so."""
    refused = [name for name in args.task or () if name in NO_METRIC]
    if refused:
        raise UsageError(f"--task {refused[0]}: its published metric cuts Chinese text by jieba; leave it out")
    there, without = data.available(args.data, args.extended)
    missing = [name for name in args.task or () if name not in there]
    if missing:
        raise UsageError(f"--task {missing[0]}: DATA {args.data} has no file of it; there are {', '.join(there)}")
    if without and not args.task:
        print(f"left out, since their metric needs jieba: {', '.join(without)}", file=sys.stderr)
    if not there:
        raise UsageError(f"DATA {args.data} has {', '.join(without)} alone, whose metrics need jieba; add others")
    return list(dict.fromkeys(args.task or there))


def _max_length(given: int | None, limit: int | None, answer: int) -> int:
    """Tokens of a prompt before the chat template."""
    if given is None and limit is None:
        raise UsageError("--max-length is needed: the endpoint does not say how many tokens it takes")
    allowed = None if limit is None else limit - answer - _TEMPLATE
    if allowed is not None and (allowed < 2 or given is not None and given > allowed):
        raise UsageError(
            f"--max-length {'is left out' if given is None else given}: the model takes {limit} tokens; {answer} for "
            f"an answer and {_TEMPLATE} for a chat template leave {max(allowed, 0)}"
        )
    if given is not None and given < 2:
        raise UsageError(f"--max-length {given}; allowed is 2 or more")
    return allowed if given is None else given


def _check_room(most: int, questions: Sequence[Question], limit: int | None) -> None:
    """Raise UsageError where a chat template takes more than was left for it: before the first question is asked."""
    longest = max(question.tokens + question.max_tokens for question in questions)
    if limit is not None and longest > limit:
        raise UsageError(
            f"--max-length {most}: with chat template and answer the longest prompt has {longest} tokens; the model "
            f"takes {limit}; give less"
        )


def _rows(scores: Scores, against: str) -> list[dict[str, Any]]:
    """Of all tasks, then of each; of LongBench-E by bucket."""
    rows = []
    ordered = sorted(scores, key=lambda key: data.BUCKETS.index(key[0]) if key[0] else 0)
    for bucket, budget, system in ordered:
        by_task, base = scores[bucket, budget, system], scores[bucket, budget, against]
        case = f" {bucket}, {budget}" if bucket else f", {budget}"
        rows += _with_all(case, system, "score", by_task)
        if system != against:
            differences = {task: paired(values, base[task]) for task, values in by_task.items()}
            rows += _with_all(case, system, "difference", differences)
    return sorted(rows, key=lambda each: not each["case"].startswith(_ALL))


def _with_all(case: str, system: str, metric: str, by_task: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = [row(f"{task}{case}", system, metric, "share", values) for task, values in by_task.items()]
    return [macro_row(f"{_ALL}{case}", system, metric, "share", list(by_task.values())), *rows]
