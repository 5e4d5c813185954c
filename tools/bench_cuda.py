"""Timing on a GPU: CUDA-graph replays over rotated operands, so that no weight is found in the L2 cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kvcompile.config import UsageError

_RUN_US = 5000.0  # of one timed run at least: event timers tick in half microseconds
_COLD_BYTES = 400_000_000
_COLD_L2 = 8  # or so many L2 caches
_COPY_BYTES = 1 << 30
_QUICK_RUNS = 3


def device() -> torch.device:
    """The current CUDA device. Raises UsageError without one."""
    if not torch.cuda.is_available():
        raise UsageError("this benchmark measures GPU kernels and finds no CUDA device: run it on a machine with one")
    return torch.device("cuda", torch.cuda.current_device())


def copies_of(size: int) -> int:
    """How many operands of `size` bytes to rotate, so that each is out of the caches when its turn comes again."""
    return max(math.ceil(max(_COLD_BYTES, _COLD_L2 * l2_bytes()) / size), 3)


def l2_bytes() -> int:
    """Of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


class Pass:
    """A CUDA graph of one pass over all copies: call(0), call(1), ... call(copies - 1)."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        self._copies = copies
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for copy in range(min(copies, 2)):  # compiles and loads what a capture had better find loaded
                call(copy)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for copy in range(copies):
                call(copy)
        self._graph.replay()
        torch.cuda.synchronize()

    def time(self, runs: int) -> list[float]:
        """Microseconds per call, one value per run; a run is as many replays as last a few milliseconds."""
        (once,) = self._times(1, 1)
        return self._times(runs, max(math.ceil(_RUN_US / (once * self._copies)), 1))

    def quick(self) -> float:
        """The least microseconds per call of a few single replays: enough to tell what is out of the question."""
        return min(self._times(_QUICK_RUNS, 1))

    def _times(self, runs: int, replays: int) -> list[float]:
        pairs = []
        for _ in range(runs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                self._graph.replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) / (replays * self._copies) for start, end in pairs]


def copy_rates(runs: int) -> Sequence[float]:
    """GB/s of device-to-device copies of 1 GiB, bytes read plus bytes written, one value per run.

    By a kernel: as a node of a graph, `copy_` is a transfer by the copy engine, and slower than what kernels read.
    """
    source = torch.randint(2**31 - 1, (_COPY_BYTES // 4,), dtype=torch.int32, device=device())
    target = torch.empty_like(source)
    times = Pass(lambda _: torch.bitwise_not(source, out=target), 2).time(runs)
    return [2 * _COPY_BYTES / us / 1e3 for us in times]
