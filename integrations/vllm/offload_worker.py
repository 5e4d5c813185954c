"""The worker's half of the offload connector: does what it is told, and says of each page and request whether it could.

It keeps what every slot holds: the tag under which it was written, and a checksum. A slot is loaded only if both are
what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from vllm.logger import init_logger

from kvcompile.integrations.vllm.offload_copies import Copies, pages_of
from kvcompile.integrations.vllm.offload_messages import NO_POOL, Answer, Move, Orders, Word

logger = init_logger("vllm.kvcompile")

COPY_FAILED, STALE, CORRUPT = "copy_failed", "stale", "checksum"  # beside NO_POOL, why a worker could not

MakeCopies = Callable[[Sequence[torch.Tensor], int], Copies]


class OffloadWorker:
    """Of one rank. page_bytes: of all layers. pool_bytes: what the host pool may take, of which it uses whole pages."""

    def __init__(self, pool_bytes: int, page_bytes: int, make: MakeCopies) -> None:
        self._slots, self._page_bytes, self._make = pool_bytes // page_bytes, page_bytes, make
        self._copies: Copies | None = None
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (tag, checksum)
        self._stores: dict[int, tuple[Move, ...]] = {}  # by batch
        self._loads: dict[int, tuple[int, ...]] = {}  # numbers of requests, by batch
        self._said_stores: dict[int, Answer] = {}  # since the word before
        self._said_loads: dict[int, Answer] = {}

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """The caches of all layers. A pool that cannot be had is no reason to end: nothing is offloaded then."""
        layers = [cache for _, cache in sorted(caches.items())]
        found = sum(pages_of(layer).shape[1] for layer in layers)
        if found != self._page_bytes:
            raise RuntimeError(f"a page of this cache has {found} bytes, and the scheduler counts {self._page_bytes}")
        try:
            self._copies = self._make(layers, self._slots)
        except (RuntimeError, MemoryError) as error:
            wanted = self._slots * self._page_bytes
            logger.warning("no host pool of %d bytes (%s): preempted requests are computed again", wanted, error)

    def execute(self, orders: Orders) -> None:
        """Begin the copies of a step, before anything of it is computed."""
        if orders.stores:
            self._store(orders.stores)
        if orders.loads:
            self._load(orders.loads)
        self._note_ended()

    def _store(self, moves: tuple[Move, ...]) -> None:
        if self._copies is None:
            _answer(self._said_stores, (move.tag for move in moves), NO_POOL)
            return
        for move in moves:
            self._held.pop(move.slot, None)
        try:
            batch = self._copies.start_store([move.block for move in moves], [move.slot for move in moves])
        except (RuntimeError, IndexError) as error:
            logger.warning_once("a copy to the host failed: %s", error)
            _answer(self._said_stores, (move.tag for move in moves), COPY_FAILED)
            return
        self._stores[batch] = moves

    def _load(self, loads: Mapping[int, tuple[Move, ...]]) -> None:
        good = {}
        for number, moves in loads.items():
            if why_not := next(filter(None, map(self._wrong, moves)), ""):
                _answer(self._said_loads, [number], why_not)
            else:
                good[number] = moves
        moves = [move for each in good.values() for move in each]
        if self._copies is None or not moves:
            return
        try:
            batch = self._copies.start_load([move.slot for move in moves], [move.block for move in moves])
        except (RuntimeError, IndexError) as error:
            logger.warning_once("a copy from the host failed: %s", error)
            _answer(self._said_loads, good, COPY_FAILED)
            return
        self._loads[batch] = tuple(good)

    def _wrong(self, move: Move) -> str:
        """Why a slot cannot be loaded; "" if it can."""
        if self._copies is None:
            return NO_POOL
        tag, checksum = self._held.get(move.slot, (None, 0))
        if tag != move.tag:
            return STALE
        return "" if self._copies.checksum(move.slot) == checksum else CORRUPT

    def _note_ended(self) -> None:
        for batch, why_not in self._copies.ended() if self._copies else ():
            if (moves := self._stores.pop(batch, None)) is not None:
                if not why_not:
                    self._held |= {move.slot: (move.tag, self._copies.checksum(move.slot)) for move in moves}
                _answer(self._said_stores, (move.tag for move in moves), why_not)
            else:
                _answer(self._said_loads, self._loads.pop(batch), why_not)

    def take_word(self) -> Word | None:
        """What has ended since the last call; None if nothing has."""
        self._note_ended()
        stores, self._said_stores = self._said_stores, {}
        loads, self._said_loads = self._said_loads, {}
        return Word(stores, loads) if stores or loads else None


def _answer(said: dict[int, Answer], keys: Iterable[int], why_not: str) -> None:
    for key in keys:
        said[key] = Answer(1, why_not)
