"""Questions that a user brings, each about a passage that is hidden among the passages of the others, as in RULER.

The file has a JSON object a line: {"context": PASSAGE, "question": TEXT, "answer": TEXT}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_tasks import Filler, Material

TASK = "questions"


class Asked(NamedTuple):
    context: str
    question: str
    answer: str


def read(file: Path) -> tuple[Asked, ...]:
    """Raises UsageError for a file that is not as above, or without a question."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--questions {file} cannot be read as UTF-8 text: {error}; give JSON lines") from error
    found = tuple(_asked(f"--questions {file}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise UsageError(
            f'--questions {file} is empty; give lines of {{"context": ..., "question": ..., "answer": ...}}'
        )
    return found


def task(questions: Sequence[Asked]) -> Callable[[Random, Filler], Material]:
    """One of the questions; around its passage are the others', or other text where all are about one passage."""

    def material(rng: Random, filler: Filler) -> Material:
        asked = rng.choice(questions)
        others = list(dict.fromkeys(each.context for each in questions if each.context != asked.context))
        return Material(
            [asked.context],
            _again_and_again(rng, others) if others else filler(rng),
            f"Answer by the text above: {asked.question}",
            "The answer is",
            [asked.answer],
        )

    return material


def _again_and_again(rng: Random, passages: list[str]) -> Iterator[str]:
    while True:
        rng.shuffle(passages)
        yield from passages


def _asked(where: str, line: str) -> Asked:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}") from error
    values = [found.get(name) if isinstance(found, dict) else None for name in Asked._fields]
    if not all(isinstance(value, str) and value.strip() for value in values):
        raise UsageError(f"{where}: {', '.join(Asked._fields)} are not all given as text")
    return Asked(*(" ".join(value.split()) for value in values))
