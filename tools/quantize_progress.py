"""Progress on standard error: a bar with the time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvcompile.config import UsageError

QUIET_S = 5.0  # between two lines
_LAST = 30  # reports that an estimate is from: as many layers, or the tensors of some
_LEAST = 0.01  # of all work, below which they are too few

Advance = Callable[[int], None]


def say(line: str) -> None:
    """A line on standard error that is not wrapped."""
    Console(stderr=True, highlight=False, markup=False).print(line, soft_wrap=True)


def print_result(text: str, out: Path) -> None:
    """Print what a run that has made `out` reports. Raises UsageError where standard output takes nothing more."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # What is left in its buffer would fail once more at exit, with a trace.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"{out} is complete, but standard output cannot be written ({error.strerror}); nothing is to be done again"
        ) from None


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """`advance(n)` reports n more of `total` units of work: units that each take about as long as any other."""
    console, estimate = Console(stderr=True), Estimate(total)
    if not console.is_terminal:
        yield _Lines(what, estimate).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, _Left(estimate), console=console) as bar:
        task = bar.add_task(what, total=total)

        def advance(units: int) -> None:
            estimate.advance(units)
            bar.advance(task, units)

        yield advance


class Estimate:
    """The time that `total` units of work still take, by what the last ones took. Times in seconds.

    The first report says nothing of the others: loading and compiling are in its time.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._last = time.monotonic()
        self._took: deque[tuple[float, int]] = deque(maxlen=_LAST)  # seconds a unit, and how many units

    def advance(self, units: int) -> None:
        now = time.monotonic()
        if self.done and units:
            self._took.append(((now - self._last) / units, units))
        self.done += units
        self._last = now

    def left(self) -> float | None:
        """None before enough is known. It runs down between two reports, at most by what the largest of them takes."""
        if not self._took or sum(units for _, units in self._took) < _LEAST * self.total:
            return None
        pace = self._pace()
        since = min(time.monotonic() - self._last, pace * max(units for _, units in self._took))
        return max(pace * (self.total - self.done) - since, 0.0)

    def _pace(self) -> float:
        """Seconds a unit, the median over units: small tensors, which are mostly overhead, do not decide it."""
        reports = sorted(self._took)
        counted = accumulate(units for _, units in reports)
        half = sum(units for _, units in reports) / 2
        return next(pace for (pace, _), so_far in zip(reports, counted, strict=True) if so_far >= half)


class _Left(ProgressColumn):
    max_refresh = 0.5

    def __init__(self, estimate: Estimate) -> None:
        super().__init__()
        self._estimate = estimate

    def render(self, task: Task) -> Text:
        left = self._estimate.left()
        return Text("" if left is None else f"{_time(left)} left")


class _Lines:
    def __init__(self, what: str, estimate: Estimate) -> None:
        self._what, self._estimate, self._tenths, self._told = what, estimate, 0, time.monotonic()

    def advance(self, units: int) -> None:
        self._estimate.advance(units)
        now, tenths = time.monotonic(), 10 * self._estimate.done // self._estimate.total
        if tenths == self._tenths or now - self._told < QUIET_S:
            return
        self._tenths, self._told = tenths, now
        left = self._estimate.left()
        say(f"quantize: {self._what}: {10 * tenths} %{'' if left is None else f', {_time(left)} left'}")


def _time(seconds: float) -> str:
    """Of 90 seconds: "1 min 30 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
