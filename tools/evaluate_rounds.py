"""Rounds of generated samples: each is one sample of every task, position and length; each seed is one round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_questions import Asked
from kvcompile.tools.evaluate_samples import Generator, Sample


@dataclass(frozen=True)
class Rounds:
    """What is asked for.

    texts: what facts are hidden in, None for generated sentences; seeds go through them in turn.
    seconds: no round begins after them, but one does.
    """

    tasks: tuple[str, ...]
    positions: tuple[str, ...]
    lengths: tuple[int, ...]
    texts: tuple[str | None, ...]
    chat: bool
    seeds: tuple[int, ...]
    seconds: float | None
    questions: tuple[Asked, ...] = ()

    def each(
        self, tokenizer: Any, limit: int | None, tokens: Callable[[Sample], int], has: str
    ) -> Iterator[list[Sample]]:
        """One round after the other.

        Raises UsageError for a prompt that has no room for what is to be hidden, and for a sample of more than `limit`
        tokens, answer included, as `tokens` counts them; `has` says what the limit is of.
        """
        generators = [Generator(tokenizer, text, self.chat, self.questions) for text in self.texts]
        start = time.monotonic()
        for index, seed in enumerate(self.seeds):
            if self.seconds is not None and index and time.monotonic() - start > self.seconds:
                print(f"stopped after {index} of {len(self.seeds)} rounds", file=sys.stderr)
                return
            samples = []
            for sample in self._round(generators[seed % len(generators)], seed, limit, has):
                total = tokens(sample)
                if limit is not None and total > limit:
                    raise UsageError(
                        f"--length {len(sample.prompt)}: {total} tokens with question and answer; {has} {limit}"
                    )
                samples.append(sample)
            yield samples

    def _round(self, generator: Generator, seed: int, limit: int | None, has: str) -> Iterator[Sample]:
        for length in self.lengths:
            if limit is not None and length > limit:  # said before such a prompt is made
                raise UsageError(f"--length {length}: {has} {limit}, question and answer included")
            for task in self.tasks:
                for position in self.positions:
                    yield generator.sample(task, position, length, seed)
