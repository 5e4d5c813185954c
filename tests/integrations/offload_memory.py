"""Simulated memory of a device and a host, and copies between them that are late or fail as they are told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvcompile.integrations.vllm.offload_copies import Copies, Ended
from kvcompile.integrations.vllm.replay import BLOCK_TOKENS as BLOCK

Page = list[Any]  # content by place in the page


class SimulatedCopies(Copies):
    """late(rng): after how many further steps a batch ends; None: never. fails(rng): whether it does so in vain."""

    def __init__(
        self,
        device: dict[int, Page],
        slots: int,
        late: Callable[[random.Random], int | None],
        fails: Callable[[random.Random], bool],
        seed: int = 0,
    ) -> None:
        self.device, self.host = device, {slot: [] for slot in range(slots)}
        self._late, self._fails, self._rng = late, fails, random.Random(seed)
        self._batches, self._step = 0, 0
        self._running: list[tuple[int, int | None, Callable[[], list[int]], bool]] = []
        self.read: Counter[int] = Counter()  # blocks
        self.written: set[int] = set()

    def _begin(self, work: Callable[[], list[int]]) -> int:
        self._batches += 1
        wait = self._late(self._rng)
        end = None if wait is None else self._step + wait
        self._running.append((self._batches, end, work, self._fails(self._rng)))
        return self._batches

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        assert not self.written & set(blocks), "a block is stored while it is loaded"
        self.read.update(blocks)

        def work() -> list[int]:
            for block, slot in zip(blocks, slots, strict=True):
                self.host[slot] = list(self.device[block])
            self.read.subtract(blocks)
            return self._checksums(slots)

        return self._begin(work)

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        assert not any(self.read[block] or block in self.written for block in blocks), "a block is loaded while busy"
        self.written |= set(blocks)
        for block in blocks:
            self.device[block] = ["in flight"] * BLOCK

        def work() -> list[int]:
            for slot, block in zip(slots, blocks, strict=True):
                self.device[block] = list(self.host[slot])
            self.written -= set(blocks)
            return self._checksums(slots)

        return self._begin(work)

    def ended(self) -> list[Ended]:
        done = [each for each in self._running if each[1] is not None and each[1] <= self._step]
        self._running = [each for each in self._running if each not in done]
        return [Ended(batch, "injected" if failed else "", work()) for batch, _, work, failed in done]

    def step(self) -> None:
        self._step += 1

    def _checksums(self, slots: Sequence[int]) -> list[int]:
        return [hash(repr(self.host[slot])) for slot in slots]
