"""The traces of `kvcompile bench schedule`: generated mixes, each with the pool it is run in, and CSV files."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcompile.config import UsageError, shown
from kvcompile.schedule.trace import Arrival

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
LIMIT_TOKENS = 2048  # what clients of the generated mixes allow: their outputs end earlier, and nobody knows when


@dataclass(frozen=True)
class Mix:
    """A kind of load. blocks: of 16 tokens in the pool. pressure: whether stock vLLM preempts under it."""

    what: str
    blocks: int
    pressure: bool
    arrivals: Callable[[random.Random, int], Iterator[tuple[float, int, int, int, int]]]

    def trace(self, requests: int, seed: int) -> list[Arrival]:
        """So many requests in the order of arrival; the same for the same seed."""
        rng = random.Random(seed)
        return [
            Arrival(time_s, prompt, output, LIMIT_TOKENS, prefix_group=group, prefix_tokens=prefix)
            for time_s, prompt, output, group, prefix in self.arrivals(rng, requests)
        ]


def lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(high, max(low, rng.lognormvariate(math.log(median), sigma))))


def _output(rng: random.Random, median: float, sigma: float = 0.6) -> int:
    return lognormal(rng, median, sigma, 8, LIMIT_TOKENS)


def _at_once(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    for _ in range(requests):
        yield 0.0, rng.randint(64, 512), _output(rng, 600), 0, 0


def _overload(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(14)
        yield now, lognormal(rng, 900, 1.0, 32, 12000), _output(rng, 400, 0.7), 0, 0


def _waves(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    for index in range(requests):
        # Chat and documents, in waves of 60 every five seconds.
        yield 5.0 * (index // 60), rng.choice([128, 192, 256, 2048, 6000]), _output(rng, 300, 0.8), 0, 0


def _prefixes(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(20)
        yield now, 1024 + rng.randint(32, 1024), _output(rng, 400), 131 * rng.randrange(8), 1024


def _flood(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    now = 0.0
    for index in range(requests):
        now += rng.expovariate(40)
        # One in thirty is long and unlike the others, which are many and alike: the denser range is always theirs.
        yield now, rng.randint(3000, 12000) if index % 30 == 7 else rng.randint(200, 260), _output(rng, 300), 0, 0


def _calm(rng: random.Random, requests: int) -> Iterator[tuple[float, int, int, int, int]]:
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(4)
        yield now, lognormal(rng, 600, 0.7, 32, 4000), _output(rng, 200), 0, 0


MIXES = {
    "at-once": Mix("short prompts with long answers, all at once", 4000, True, _at_once),
    "overload": Mix("prompts of 32 to 12,000 tokens, faster than they are served", 6000, True, _overload),
    "waves": Mix("chat and documents in waves", 6000, True, _waves),
    "prefixes": Mix("eight system prompts of 1,024 tokens, faster than they are served", 5000, True, _prefixes),
    "flood": Mix("many alike, and one in thirty long: the worst case for waiting", 4000, True, _flood),
    "calm": Mix("no pressure: blocks for all", 30000, False, _calm),
}


def read_trace(path: Path) -> list[Arrival]:
    """A trace from a CSV with the columns arrival_s, prompt_tokens and output_tokens, perhaps max_tokens and priority.

    Without max_tokens every client's limit is the longest output in the file. Raises UsageError, naming the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--trace {path}: cannot be read ({reason}); give a CSV file") from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise UsageError(f"--trace {path}: no column {', '.join(missing)}; needed are {', '.join(COLUMNS)}")
    if not rows:
        raise UsageError(f"--trace {path}: no request in it; give one line for each")

    def number(row: dict[str, str], line: int, name: str, least: float, kind: type = int) -> float:
        try:
            value = kind(row[name])
        except (TypeError, ValueError):
            value = math.nan
        if not least <= value < math.inf:
            raise UsageError(
                f"--trace {path}, line {line}: {name} is {shown(row[name])}; allowed is a "
                f"{'number of seconds' if kind is float else 'whole number'}, {least:g} or more"
            )
        return value

    trace = []
    longest = max(number(row, line, "output_tokens", 1) for line, row in enumerate(rows, 2))
    for line, row in enumerate(rows, 2):
        output = number(row, line, "output_tokens", 1)
        limit = number(row, line, "max_tokens", output) if "max_tokens" in names else longest
        priority = number(row, line, "priority", -(2**31)) if "priority" in names else 0
        trace.append(
            Arrival(
                number(row, line, "arrival_s", 0, float),
                number(row, line, "prompt_tokens", 1),
                output,
                limit,
                priority=priority,
            )
        )
    return sorted(trace, key=lambda arrival: arrival.time_s)
