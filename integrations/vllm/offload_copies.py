"""Copies of pages between a worker's KV cache and its host pool: the interface, and that of a CPU."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

COPY_FAILED = "copy_failed"


class Ended(NamedTuple):
    """A batch that has ended, by the number that `start` gave it.

    why_not: "" if it was copied, whole. checksums: of each page at its place, as it was read: of a page that was stored
    and of the same one loaded again they are equal; if not, what was loaded is not what was stored.
    """

    batch: int
    why_not: str
    checksums: Sequence[int]


class Copies(ABC):
    """One batch for each direction and step, whatever the number of pages and layers.

    A batch begins when all work on the cache that was submitted before it is done: the step before may still write to
    the blocks. Until it has ended, none of its blocks and slots is used otherwise: that is the scheduler's part. Both
    directions of a step may be copied at once.

    `start` raises RuntimeError or IndexError for a batch that has not begun and never will.
    """

    @abstractmethod
    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        """Copy each block to the slot at its place. The batch's number."""

    @abstractmethod
    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """Copy each slot to the block at its place. The batch's number."""

    @abstractmethod
    def ended(self) -> list[Ended]:
        """The batches that have ended since the last call, in order; does not wait."""


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """One layer's cache, whose first dimension is the block and whose blocks are packed, as uint8 [blocks, bytes].

    Raises ValueError for a cache in which a block is more than one run of bytes.
    """
    if not cache[0].is_contiguous():
        raise ValueError(
            f"a cache of shape {tuple(cache.shape)} and strides {cache.stride()} cannot be offloaded: each block, by "
            "the first dimension, has to be one run of memory"
        )
    return cache.view(cache.shape[0], -1).view(torch.uint8)


class CPUCopies(Copies):
    """Plain copies of memory: a batch has ended when it has begun.

    Raises RuntimeError if there is no memory for the pool, which is allocated whole, and once.
    """

    def __init__(self, caches: Sequence[torch.Tensor], slots: int) -> None:
        self._layers = [pages_of(cache) for cache in caches]
        widths = [layer.shape[1] for layer in self._layers]
        self._pool = torch.empty((slots, sum(widths)), dtype=torch.uint8, device="cpu")
        self._of_layer = torch.split(self._pool, widths, dim=1)
        self._batches = 0
        self._ended: list[Ended] = []

    @property
    def nbytes(self) -> int:
        """Of the pool."""
        return self._pool.nbytes

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        source, target = torch.tensor(blocks, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
        for layer, part in zip(self._layers, self._of_layer, strict=True):
            part[target] = layer[source]
        return self._end(slots)

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        source, target = torch.tensor(slots, dtype=torch.int64), torch.tensor(blocks, dtype=torch.int64)
        for layer, part in zip(self._layers, self._of_layer, strict=True):
            layer[target] = part[source]
        return self._end(slots)

    def _end(self, slots: Sequence[int]) -> int:
        self._batches += 1
        self._ended.append(Ended(self._batches, "", [zlib.crc32(self._pool[slot].numpy()) for slot in slots]))
        return self._batches

    def ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended
