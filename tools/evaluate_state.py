"""Answers of `kvcompile evaluate` as they come, in a file beside the record, so that a run can be taken up again.

They are found by a digest of what was asked, so that no answer can stand for another question. Which one of a server's
settings it has is not known here: whoever takes a run up serves what was served before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvcompile.tools import state_file
from kvcompile.tools.state_file import StateFile

ANSWERS = "answers"  # what they are called in messages
# What results go to, how fast they come, how many at least, what they are compared with: no answer depends on it.
_WITHOUT_EFFECT = ("json", "markdown", "plot", "processes", "concurrency", "timeout", "seconds", "against")
_CHECKPOINT = ("*.safetensors", "config.json", "tokenizer*", "*.jinja")
T = TypeVar("T")


class Kept:
    """Answers, JSON values each. Threads may ask at once, and processes, each of which has a copy of what was there."""

    def __init__(self, path: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self._found: dict[str, Any] = {}
        self.file = None if path is None else StateFile(path, identity or {}, ANSWERS, self._take)

    @property
    def count(self) -> int:
        """Answers that were there from the start."""
        return self.file.kept if self.file else 0

    def of(self, asked: Any, answer: Callable[[], T]) -> T:
        """The answer to `asked`, a JSON value, if it is there, or else what `answer` gives, which is kept."""
        if self.file is None:
            return answer()
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if digest not in self._found:
            entry = {"asked": digest, "answer": answer()}
            self.file.append(entry)
            self._take(entry)
        return self._found[digest]

    def done(self) -> None:
        """The record has been written."""
        if self.file:
            self.file.done()

    def _take(self, entry: dict[str, Any]) -> None:
        self._found[entry["asked"]] = entry["answer"]


def opened(args: argparse.Namespace, **more: Any) -> Kept:
    """Empty, or with what the same command has left beside --json; without --json nothing is kept.

    more: what answers depend on besides the options, the checkpoint and kvcompile itself. Raises UsageError if another
    command has left something there.
    """
    if not args.json:
        return Kept()
    options = {
        name: value
        for name, value in vars(args).items()
        if name not in _WITHOUT_EFFECT and not callable(value)  # those are what runs the command
    }
    identity = {**options, "checkpoint": _files(args.model), **more, **state_file.installation("transformers")}
    kept = Kept(state_file.beside(args.json), json.loads(json.dumps(identity, default=str)))
    state_file.tell(f"evaluate {args.what}", kept.file, ANSWERS)
    return kept


def _files(model: Path) -> list[list[Any]]:
    """Names, sizes and times of what decides a checkpoint's answers. Whoever loads it tells what is missing."""
    found = sorted(path for pattern in _CHECKPOINT for path in model.glob(pattern))
    return [[path.name, (of := path.stat()).st_size, of.st_mtime_ns] for path in found]
