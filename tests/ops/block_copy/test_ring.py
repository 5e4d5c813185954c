"""The ring of moves and checksums: entries go round, and none is given twice."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch

from kvcompile.ops.block_copy.ring import Ring, ring_bytes


def _ring(capacity: int, layers: int) -> Ring:
    return Ring(torch.zeros(ring_bytes(capacity, layers), dtype=torch.uint8), capacity, layers)


def test_batches_that_begin_and_end_at_random_have_their_own_entries() -> None:
    capacity, rng = 7, random.Random(0)
    ring, running, used = _ring(capacity, 3), deque(), 0
    for _ in range(500):
        if used < capacity and rng.random() < 0.5:
            count = rng.randint(1, capacity - used)
            blocks = [rng.randrange(1000) for _ in range(count)]
            slots = [rng.randrange(1000) for _ in range(count)]
            begin = ring.place(blocks, slots)
            entries = [(begin + i) % capacity for i in range(count)]
            assert not set(entries) & {entry for each, *_ in running for entry in each}
            ring.sums[entries] = np.array(blocks, dtype=np.uint64)[:, None] << np.uint64(62)  # their sum overflows
            ring.keep(count)
            running.append((entries, blocks, slots))
            used += count
        elif running:
            entries, blocks, slots = running.popleft()
            assert ring.moves[entries].tolist() == [list(move) for move in zip(blocks, slots, strict=True)]
            assert ring.give_back(len(entries)) == [(3 * (block << 62)) % 2**64 for block in blocks]
            used -= len(entries)


def test_more_than_it_holds_is_refused_and_a_batch_that_did_not_begin_takes_nothing() -> None:
    ring = _ring(4, 1)
    ring.place([1, 2, 3], [1, 2, 3])
    assert ring.place([5, 6, 7], [0, 1, 2]) == 0
    ring.keep(3)
    with pytest.raises(RuntimeError, match="3 of 4 pages at a time are under way, 2 are wanted"):
        ring.place([1, 2], [1, 2])
    assert ring.place([9], [3]) == 3
