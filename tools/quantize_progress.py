"""Progress on standard error: a bar with the time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_S = 5.0  # between two lines

Advance = Callable[[int], None]


def say(line: str) -> None:
    """A line on standard error that is not wrapped."""
    Console(stderr=True, highlight=False, markup=False).print(line, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """`advance(n)` reports n more of `total` units of work, of any kind."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what, total).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = TimeRemainingColumn(), TextColumn("left")
    with Progress(*columns, *left, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda units: bar.advance(task, units)


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._tenths = what, total, 0, 0
        self._start = self._told = time.monotonic()

    def advance(self, units: int) -> None:
        self._done += units
        now, tenths = time.monotonic(), 10 * self._done // self._total
        if tenths == self._tenths or now - self._told < QUIET_S:
            return
        self._tenths, self._told = tenths, now
        left = (now - self._start) * (self._total / self._done - 1)
        say(f"quantize: {self._what}: {10 * tenths} %, {left:.0f} s left")
