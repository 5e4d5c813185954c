"""What `kvcompile evaluate retrieval` can be told, and what of it both ways of running share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_endpoint, evaluate_methods, evaluate_questions, evaluate_report
from kvcompile.tools.evaluate_rounds import Rounds
from kvcompile.tools.evaluate_samples import POSITIONS
from kvcompile.tools.evaluate_tasks import TASKS

ANSWER_TOKENS = 128
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a Hugging Face checkpoint; with --endpoint its tokenizer"
    )
    parser.add_argument(
        "--task",
        action="append",
        choices=(*TASKS, evaluate_questions.TASK),
        help="(default: all; served, all but continuation)",
    )
    parser.add_argument(
        "--position",
        action="append",
        choices=POSITIONS,
        help="of the question: at the end of the prompt, at its start, or in a later turn of the chat (default: all)",
    )
    parser.add_argument("--length", action="append", type=int, help="tokens of a prompt (default: 1024 and 2048)")
    parser.add_argument(
        "--budget", action="append", help="kept: a share or tokens (default: 50%%, 25%% and 544; served: the server's)"
    )
    evaluate_methods.add_arguments(parser, "all, each with its defaults")
    parser.add_argument("--samples", type=int, default=4, help="of each task, position and length (default 4)")
    parser.add_argument("--first-seed", type=int, default=0, help="samples are numbered from here (default 0)")
    parser.add_argument("--seconds", type=float, help="begin no further round of samples after this")
    parser.add_argument(
        "--text",
        action="append",
        type=Path,
        metavar="FILE",
        help="hide facts in this text; with several, in turn (default: generated sentences)",
    )
    parser.add_argument(
        "--generated", action="store_true", help="with --text: generated sentences too, in turn with the texts"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help='also ask these, hidden among their passages: lines of {"context": ..., "question": ..., "answer": ...}',
    )
    parser.add_argument("--plain", action="store_true", help="prompts without the tokenizer's chat template")
    parser.add_argument(
        "--against",
        help="system of paired differences (default: andpro, or full if that is not asked for; served: the first)",
    )
    parser.add_argument("--processes", type=int, help="that share the rounds and the device (default 1)")
    evaluate_endpoint.add_arguments(parser)
    parser.add_argument("--answer-tokens", type=int, help=f"most of a served answer (default {ANSWER_TOKENS})")
    evaluate_report.add_arguments(parser)


def rounds(args: argparse.Namespace, tasks: tuple[str, ...]) -> Rounds:
    """The rounds that are asked for, of `tasks` unless some are named. Raises UsageError for what is not allowed."""
    if args.samples < 1:
        raise UsageError(f"--samples {args.samples}; allowed is 1 or more")
    if args.seconds is not None and not args.seconds >= 0:
        raise UsageError(f"--seconds {args.seconds}; allowed is 0 or more")
    if args.first_seed < 0:
        raise UsageError(f"--first-seed {args.first_seed}; allowed is 0 or more")
    asked = evaluate_questions.TASK
    questions = () if args.questions is None else evaluate_questions.read(args.questions)
    if args.task and (asked in args.task) != bool(questions):
        raise UsageError(f"--task {asked} and --questions FILE belong together; give both or neither")
    texts: list[str | None] = [_read(path) for path in args.text or ()]
    if not texts or args.generated:
        texts.append(None)
    return Rounds(
        tasks=_once(args.task or ([*tasks, asked] if questions else tasks)),
        positions=_once(args.position or POSITIONS),
        lengths=_once(args.length or (1024, 2048)),
        texts=tuple(texts),
        chat=not args.plain,
        seeds=tuple(range(args.first_seed, args.first_seed + args.samples)),
        seconds=args.seconds,
        questions=questions,
    )


def _once(items: Iterable[T]) -> tuple[T, ...]:
    """In the order given: what is asked for twice is measured once."""
    return tuple(dict.fromkeys(items))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path} cannot be read as UTF-8 text: {error}; give a plain text file") from error
