"""Copies under way: which blocks they hold, what workers are told to do, and what they have said.

Blocks are pinned (held once more) while a copy reads them, and freed when all ranks have answered: a copy is made if
every rank says so, and is not if one says why not. Blocks of a load are its request's; where that goes on without them
(it has been aborted, or computed again since a reset) they are set aside: held here until all ranks have answered, as
one may still write to them. No answer of some rank for too long (`DEADLINE_S` and `DEADLINE_OUTPUTS`): a block that was
only read is freed, and its slot set aside; those of a load are set aside, and nothing is copied any more until the last
rank has spoken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvcompile.integrations.vllm.offload_messages import Answer, Move, Orders, Word
from kvcompile.offload.host_pool import Copy, HostPool, State

# Without an answer for as long, and as many outputs of workers: a step may take longer than the one or the other.
DEADLINE_S, DEADLINE_OUTPUTS = 30.0, 16


class _Since(NamedTuple):
    time_s: float
    outputs: int


@dataclass
class Store:
    copy: Copy
    block: KVCacheBlock
    since: _Since
    answer: Answer = field(default_factory=lambda: Answer(0))
    pinned: bool = True
    overdue: bool = False


@dataclass
class Load:
    """For one request. blocks: those that are written to. prefix_hits: tokens that the device had of a request that
    begins; None: it is a restore. aside: its blocks are, and the request has nothing to do with it any more. overdue:
    nobody has answered for too long; aside, too. void: what is loaded is not valid any more.
    """

    request: Any
    copies: list[Copy]
    blocks: list[KVCacheBlock]
    since: _Since
    prefix_hits: int | None = None
    answer: Answer = field(default_factory=lambda: Answer(0))
    aside: bool = False
    overdue: bool = False
    void: bool = False


class Transfers:
    """Between the blocks of a device pool and a host pool, by workers of so many ranks."""

    def __init__(self, host: Callable[[], HostPool], ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._all_ranks, self.clock = host, (1 << ranks) - 1, clock
        self._device: BlockPool | None = None
        self.stores: dict[int, Store] = {}  # by tag
        self.loads: dict[int, Load] = {}  # by number
        self._numbers = self._outputs = 0
        self._overdue = 0  # of the stores and loads here
        self._move_stores: list[Move] = []
        self._move_loads: dict[int, tuple[Move, ...]] = {}

    def bind(self, device: BlockPool) -> None:
        self._device = device

    def blocks(self, ids: Iterable[int]) -> list[KVCacheBlock]:
        """Of the device pool."""
        return [self._device.blocks[block_id] for block_id in ids]

    # ---- what is begun

    def store(self, copy: Copy, block: KVCacheBlock) -> None:
        self._device.touch([block])
        self.stores[copy.tag] = Store(copy, block, self._now())
        self._move_stores.append(Move(block.block_id, copy.slot, copy.tag))

    def load(
        self, request: Any, copies: list[Copy], blocks: list[KVCacheBlock], prefix_hits: int | None = None
    ) -> None:
        """blocks: at their place, one for each copy; those of a table that the request holds."""
        self._numbers += 1
        for copy in copies:
            self._host().begin_read(copy)
        moves = zip(blocks, copies, strict=True)
        self._move_loads[self._numbers] = tuple(Move(block.block_id, copy.slot, copy.tag) for block, copy in moves)
        self.loads[self._numbers] = Load(request, copies, blocks, self._now(), prefix_hits)

    def take_orders(self) -> Orders:
        stores, self._move_stores = tuple(self._move_stores), []
        loads, self._move_loads = self._move_loads, {}
        return Orders(stores, loads)

    # ---- what is heard

    def step_ended(self) -> None:
        """Of the workers, whether or not they had a word to say."""
        self._outputs += 1

    def stores_ended(self, word: Word) -> Iterator[Store]:
        """Of which all ranks have spoken with this word; one that is known to nobody any more is passed over."""
        for tag, answer in word.stores.items():
            if store := self.stores.get(tag):
                store.answer = store.answer.and_also(answer)
                if store.answer.ranks == self._all_ranks:
                    self._overdue -= store.overdue
                    yield self.stores.pop(tag)

    def loads_ended(self, word: Word) -> Iterator[Load]:
        for number, answer in word.loads.items():
            if load := self.loads.get(number):
                load.answer = load.answer.and_also(answer)
                if load.answer.ranks == self._all_ranks:
                    for copy in load.copies:
                        self._host().end_read(copy)
                    self._overdue -= load.overdue
                    yield self.loads.pop(number)

    def unpin(self, store: Store) -> int:
        """How many blocks have come back."""
        if not store.pinned:
            return 0
        store.pinned = False
        # One that no prefix hit can find is as good as empty: used first.
        self._device.free_blocks([store.block], prepend=store.block.block_hash is None)
        return 1

    def give_back(self, load: Load) -> int:
        """Blocks that were set aside, which nobody writes to any more. How many."""
        self._device.free_blocks(reversed(load.blocks))
        return len(load.blocks)

    # ---- what is not waited for

    def set_aside(self, load: Load) -> bool:
        """Its request goes on without it, and gives up its table next. Whether that is new."""
        if load.aside:
            return False
        load.aside = True
        self._device.touch(load.blocks)
        return True

    def void(self) -> list[Load]:
        """What is being loaded is not valid any more: those of which that is new, and whose requests wait for them."""
        found = [load for load in self.loads.values() if not (load.void or load.aside)]
        for load in found:
            load.void = True
        return found

    @contextmanager
    def lent(self) -> Iterator[None]:
        """For a moment in which nobody takes blocks, those that are held here are as free as if nothing was copied."""
        blocks = self.blocks(self.pins())
        for block in blocks:  # one may be held twice
            self._device.free_blocks([block])
        try:
            yield
        finally:
            self._device.touch(blocks)

    def _now(self) -> _Since:
        return _Since(self.clock(), self._outputs)

    def _is_overdue(self, since: _Since) -> bool:
        return self.clock() - since.time_s > DEADLINE_S and self._outputs - since.outputs > DEADLINE_OUTPUTS

    def stores_overdue(self) -> list[Store]:
        """Those that nobody has answered for too long, from now on; their blocks are freed."""
        late = [store for store in self.stores.values() if store.pinned and self._is_overdue(store.since)]
        for store in late:
            store.overdue = True
            self.unpin(store)
        self._overdue += len(late)
        return late

    def loads_overdue(self) -> list[Load]:
        """The same of loads whose requests waited for them; their blocks are set aside."""
        late = [load for load in self.loads.values() if not load.overdue and self._is_overdue(load.since)]
        for load in late:
            load.overdue = True
        self._overdue += len(late)
        return [load for load in late if self.set_aside(load)]

    @property
    def late(self) -> bool:
        """Whether an answer is still missing that should have come: asked of every request that runs, in a step."""
        return self._overdue > 0

    @property
    def waiting(self) -> bool:
        """Whether an answer is waited for that frees blocks."""
        return any(s.pinned for s in self.stores.values()) or any(not load.overdue for load in self.loads.values())

    def pins(self) -> Iterable[int]:
        """Ids of the blocks that are held here, once for each time."""
        yield from (store.block.block_id for store in self.stores.values() if store.pinned)
        yield from (block.block_id for load in self.loads.values() if load.aside for block in load.blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything that is being copied is known here."""
        writing = {copy.tag for copy in self._host().copies() if copy.state is State.FILLING}
        reading = {copy.tag for copy in self._host().copies() if copy.state is State.READING}
        assert writing == set(self.stores), "copies are written that nobody waits for"
        assert reading == {copy.tag for load in self.loads.values() for copy in load.copies}, "the same of reading"
        overdue = sum(each.overdue for each in (*self.stores.values(), *self.loads.values()))
        assert overdue == self._overdue, f"{overdue} answers are overdue, {self._overdue} are counted"
