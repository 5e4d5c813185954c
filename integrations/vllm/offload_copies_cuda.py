"""Copies between a GPU's cache and pinned host memory: one kernel launch a direction and step, on a stream of its own.

                 step N          | step N + 1       | step N + 2
    compute  ....writes page 7...|..................|....................
                                 ^ event            |
    store                        +--- reads page 7 --- ended: seen by a query, said with the word of a later step

Why no page is written while it is stored, and none used while it is loaded, though step N + 1 is submitted before the
output of N is known: orders come with step N + 1 and begin after an event behind all of step N. Of a running request
only pages are stored that steps up to N fill, and no step writes to a full page again (pruning, which moves tokens, is
waited for); of a preempted one nothing is computed any more. Its blocks are held by the scheduler until it has heard
that the store has ended. Blocks that are loaded were free: step N was the last that could still use them, and the
request that gets them runs when the scheduler has heard, so that the step in which it does is submitted after the host
has seen the load's event: the compute stream need not wait, and never does.

The kernel reads and writes the pool in host memory itself, without a buffer on the device, and nothing is submitted
beside it: what it is to copy, and the checksums that it finds, lie in pinned memory too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvcompile.integrations.vllm.offload_copies import COPY_FAILED, Copies, Ended, pages_of
from kvcompile.ops.block_copy.cuda import BlockCopy
from kvcompile.ops.block_copy.pinned import pinned
from kvcompile.ops.block_copy.ring import Ring, ring_bytes


class CUDACopies(Copies):
    """The pool is pinned memory of `slots` pages, no byte more; 8 bytes, and 8 a layer, of each slot and each block lie
    beside it. make: of the layers, what copies their pages.

    Raises RuntimeError if the driver cannot pin as much, and what `BlockCopy` raises.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        slots: int,
        make: Callable[[Sequence[torch.Tensor]], BlockCopy] = BlockCopy,
    ) -> None:
        layers = [pages_of(cache) for cache in caches]
        pages = make(layers)
        self._blocks, self._slots = min(layer.shape[0] for layer in layers), slots
        self._pool = pinned(slots * pages.row_bytes, pages.device).view(slots, pages.row_bytes)
        # Nobody stores to a slot twice at a time, nor loads into a block.
        self._stores, self._loads = (
            Direction(copy, self._pool, capacity, len(layers), pages.device)
            for copy, capacity in ((pages.store, slots), (pages.load, self._blocks))
        )
        self._batches = 0

    @property
    def nbytes(self) -> int:
        """Of the pool."""
        return self._pool.nbytes

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        return self._start(self._stores, blocks, slots)

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        return self._start(self._loads, blocks, slots)

    def _start(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> int:
        # A kernel would write to whatever lies there.
        for what, numbers, end in (("block", blocks, self._blocks), ("slot", slots, self._slots)):
            if not 0 <= min(numbers) <= max(numbers) < end:
                raise IndexError(f"{what} {min(numbers)} to {max(numbers)} is to be copied, and there are {end}")
        direction.start(self._batches + 1, blocks, slots)
        self._batches += 1
        return self._batches

    def ended(self) -> list[Ended]:
        return sorted([*self._stores.ended(), *self._loads.ended()])


class Direction:
    """One way of copying, whose batches run one after the other on a stream of their own.

    copy(rows, ring, begin, count): submit the copy of a batch to the current stream. capacity: pages at a time.
    """

    def __init__(
        self,
        copy: Callable[[torch.Tensor, Ring, int, int], None],
        rows: torch.Tensor,
        capacity: int,
        layers: int,
        device: torch.device,
    ) -> None:
        self._copy, self._rows, self._device = copy, rows, device
        self._ring = Ring(pinned(ring_bytes(capacity, layers), device), capacity, layers)
        self._stream = torch.cuda.Stream(device)
        self._running: deque[tuple[int, int, torch.cuda.Event]] = deque()  # batch, its pages, and what ends it

    def start(self, batch: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """After all that the current stream has been given. Raises RuntimeError."""
        begin, event = self._ring.place(blocks, slots), torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(self._rows, self._ring, begin, len(blocks))
        event.record(self._stream)
        self._ring.keep(len(blocks))
        self._running.append((batch, len(blocks), event))

    def ended(self) -> list[Ended]:
        """Does not wait. A batch of which the driver says that it failed has ended, too."""
        found = []
        while self._running:
            batch, pages, event = self._running[0]
            why_not = ""
            try:
                if not event.query():
                    break
            except RuntimeError:
                why_not = COPY_FAILED
            self._running.popleft()
            found.append(Ended(batch, why_not, self._ring.give_back(pages)))
        return found
