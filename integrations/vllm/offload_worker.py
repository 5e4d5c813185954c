"""The worker's half of the offload connector: does what it is told, and says of each page and request whether it could.

It keeps what every slot holds: the tag under which it was written, and a checksum. A slot of another tag is not loaded;
of one whose checksum is another once it has been, that is the answer, and its request does not run on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvcompile.integrations.vllm.offload_copies import COPY_FAILED, Copies, CPUCopies, Ended, pages_of
from kvcompile.integrations.vllm.offload_copies_cuda import CUDACopies
from kvcompile.integrations.vllm.offload_messages import NO_POOL, Answer, Move, Orders, Word

logger = init_logger("vllm.kvcompile")

STALE, CORRUPT = "stale", "checksum"  # beside NO_POOL and COPY_FAILED, why a worker could not

MakeCopies = Callable[[Sequence[torch.Tensor], int], Copies]


def copies_of_platform() -> MakeCopies:
    return CPUCopies if current_platform.is_cpu() else CUDACopies


class OffloadWorker:
    """Of one rank. page_bytes: of all layers. pool_bytes: what the host pool may take, of which it uses whole pages."""

    def __init__(self, pool_bytes: int, page_bytes: int, make: MakeCopies) -> None:
        self._slots, self._page_bytes, self._make = pool_bytes // page_bytes, page_bytes, make
        self._copies: Copies | None = None
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (tag, checksum)
        self._stores: dict[int, tuple[Move, ...]] = {}  # by batch
        # By batch and number: the checksums that its pages had.
        self._loads: dict[int, dict[int, list[int]]] = {}
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
        self._loads[batch] = {number: [self._held[move.slot][1] for move in each] for number, each in good.items()}

    def _wrong(self, move: Move) -> str:
        """Why a slot cannot be loaded; "" if it can."""
        if self._copies is None:
            return NO_POOL
        tag, _ = self._held.get(move.slot, (None, 0))
        return "" if tag == move.tag else STALE

    def _note_ended(self) -> None:
        for ended in self._copies.ended() if self._copies else ():
            if (moves := self._stores.pop(ended.batch, None)) is not None:
                self._note_stored(moves, ended)
            else:
                self._note_loaded(self._loads.pop(ended.batch), ended)

    def _note_stored(self, moves: tuple[Move, ...], ended: Ended) -> None:
        if not ended.why_not:
            for move, checksum in zip(moves, ended.checksums, strict=True):
                self._held[move.slot] = move.tag, checksum
        _answer(self._said_stores, (move.tag for move in moves), ended.why_not)

    def _note_loaded(self, wanted: dict[int, list[int]], ended: Ended) -> None:
        found = iter(ended.checksums)
        for number, checksums in wanted.items():
            corrupt = not ended.why_not and checksums != list(islice(found, len(checksums)))
            _answer(self._said_loads, [number], CORRUPT if corrupt else ended.why_not)

    def take_word(self) -> Word | None:
        """What has ended since the last call; None if nothing has."""
        self._note_ended()
        stores, self._said_stores = self._said_stores, {}
        loads, self._said_loads = self._said_loads, {}
        return Word(stores, loads) if stores or loads else None


def _answer(said: dict[int, Answer], keys: Iterable[int], why_not: str) -> None:
    for key in keys:
        said[key] = Answer(1, why_not)
