"""Who is preempted when blocks run out: the one whose preemption wastes the least computed work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Stake(NamedTuple):
    """What a running request stands to lose, in the order in which requests are kept.

    priority: vLLM's, less is more important. lost_tokens: computed tokens of which the host has no copy, which would be
    computed again. arrival: of two that lose the same, the later one goes first.
    """

    priority: int
    lost_tokens: int
    arrival: float


def keep_order(running: Iterable[T], stake: Callable[[T], Stake]) -> list[T]:
    """The running requests, those to be kept first in front and the next victim last.

    vLLM takes its victims from the end and schedules from the front, so that a victim is never one that already has
    blocks in the same step.
    """

    def key(request: T) -> tuple[int, int, float]:
        priority, lost, arrival = stake(request)
        return priority, -lost, arrival

    return sorted(running, key=key)
