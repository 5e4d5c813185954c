"""What a kernel of block_copy.cu reads and writes in host memory beside the pages, for the batches of one direction.

A batch takes the next entries, one a page, and gives them back when it has ended; batches end in the order in which
they have begun. Entries are used round and round, so that no batch allocates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MOVE_BYTES = 2 * 4  # block, slot
SUM_BYTES = 8  # of each layer


def ring_bytes(capacity: int, layers: int) -> int:
    """Of memory for a ring of so many entries."""
    return capacity * (MOVE_BYTES + layers * SUM_BYTES)


class Ring:
    """memory: uint8 [ring_bytes(capacity, layers)], where the device finds it too.

    moves int32 [capacity, 2]: block and slot of an entry's page. sums uint64 [capacity, layers]: the checksums of its
    parts, written by the device.
    """

    def __init__(self, memory: torch.Tensor, capacity: int, layers: int) -> None:
        whole = memory.numpy()
        end = capacity * layers * SUM_BYTES
        self.sums = whole[:end].view(np.uint64).reshape(capacity, layers)
        self.moves = whole[end:].view(np.int32).reshape(capacity, 2)
        self.capacity = capacity
        self._begin = self._used = 0

    def place(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        """Note the moves of the next batch in the next entries; the first of these. They are its own from `keep` on.

        Raises RuntimeError if so many entries are not free.
        """
        if len(blocks) > self.capacity - self._used:
            raise RuntimeError(
                f"{self._used} of {self.capacity} pages at a time are under way, {len(blocks)} are wanted"
            )
        begin = (self._begin + self._used) % self.capacity
        entries = np.arange(begin, begin + len(blocks)) % self.capacity
        self.moves[entries, 0], self.moves[entries, 1] = blocks, slots
        return begin

    def keep(self, count: int) -> None:
        """The batch placed last, of so many pages, has begun."""
        self._used += count

    def give_back(self, count: int) -> list[int]:
        """The oldest batch, of so many pages, has ended: the checksum of each page."""
        entries = np.arange(self._begin, self._begin + count) % self.capacity
        self._begin, self._used = (self._begin + count) % self.capacity, self._used - count
        return self.sums[entries].sum(axis=1, dtype=np.uint64).tolist()
