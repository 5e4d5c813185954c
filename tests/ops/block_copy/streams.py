"""A GPU's streams on the CPU: what is submitted, kernels too, runs when it is told to, in the order of its stream."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.integrations.vllm import offload_copies_cuda
from kvcompile.ops import launch
from tests.ops.block_copy import on_cpu


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self._work: deque[Callable[[], bool]] = deque()  # False: not yet

    def submit(self, work: Callable[[], Any]) -> None:
        self._work.append(lambda: (work(), True)[1])

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self._work.append(event.query)

    def run(self) -> None:
        """All that waits for no other stream."""
        while self._work and self._work[0]():
            self._work.popleft()


class Event:
    def __init__(self) -> None:
        self._done = False

    def record(self, stream: Stream) -> None:
        def done() -> None:
            self._done = True

        stream.submit(done)

    def query(self) -> bool:
        return self._done


class GPU:
    """Streams that are made on it, the compute stream first, and the bytes that were pinned for each purpose."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.pinned: list[int] = []

    def pin(self, size: int, device: torch.device) -> torch.Tensor:
        self.pinned.append(size)
        return torch.full((size,), 171, dtype=torch.uint8)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def kernel(self, source: Path, name: str, device: torch.device, **given: Any) -> Callable[..., None]:
        run = on_cpu.kernel(source, name, device, **given)
        return lambda *args: self.current.submit(lambda: run(*args))


def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    """Put in the place of torch's streams and of what a GPU's copies take."""
    made = GPU()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(offload_copies_cuda, "pinned", made.pin)
    monkeypatch.setattr(launch, "kernel", made.kernel)
    return made
