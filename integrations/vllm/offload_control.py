"""The scheduler's half of the offload connector: what is copied, and what became of it.

Blocks are pinned (held once more) while a copy reads them, and freed when the workers have answered. No answer for too
long: a block that was only read is freed, and its slot set aside; one that a load may still write to is set aside, its
request computed again, and nothing is restored any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvcompile.integrations.vllm.offload_messages import NO_POOL, Answer, Move, Orders, Word
from kvcompile.offload.books import Books, Life, Missing
from kvcompile.offload.counters import Counters, Reason
from kvcompile.offload.host_pool import Copy, State

logger = init_logger("vllm.kvcompile")

# Without an answer for as long, and as many outputs of workers: a step may take longer than the one or the other.
DEADLINE_S, DEADLINE_OUTPUTS = 30.0, 16


class _Since(NamedTuple):
    time_s: float
    outputs: int


@dataclass
class _Store:
    copy: Copy
    block: KVCacheBlock
    since: _Since
    answer: Answer = field(default_factory=lambda: Answer(0))
    pinned: bool = True
    overdue: bool = False


@dataclass
class Load:
    """Of one request. blocks: those that are written to. overdue: they are set aside, its request goes on without."""

    request: Any
    copies: list[Copy]
    blocks: list[KVCacheBlock]
    since: _Since
    answer: Answer = field(default_factory=lambda: Answer(0))
    overdue: bool = False


class OffloadControl:
    """`books` and the blocks of a device pool, for workers of so many ranks.

    take_back(request_id, shape): a request whose life had a shape has its table, and goes on as it was.
    """

    def __init__(
        self, books: Books, page_bytes: int, ranks: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.books, self.counters = books, Counters(page_bytes)
        self._ranks, self._clock = ranks, clock
        self._pool: BlockPool | None = None
        self.take_back: Callable[[str, Any], None] = lambda request_id, shape: None
        self._stores: dict[int, _Store] = {}  # by tag
        self._loads: dict[int, Load] = {}  # by number
        self._numbers = self._outputs = 0
        self._move_stores: list[Move] = []
        self._move_loads: dict[int, tuple[Move, ...]] = {}
        self._no_pool = False
        self._said: set[Reason] = set()

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def why_off(self) -> Reason | None:
        """Why nothing is copied now; None if it is."""
        if self._no_pool:
            return Reason.NO_POOL
        late = any(each.overdue for each in (*self._stores.values(), *self._loads.values()))
        return Reason.SWITCHED_OFF if late else None

    def _now(self) -> _Since:
        return _Since(self._clock(), self._outputs)

    # ---- saving

    def back_up(self, request_id: str, page: int, block: KVCacheBlock) -> None:
        """Copy a full page of a running request, if a slot is free."""
        if copy := self.books.back_up(request_id, page):
            self._store(copy, block)

    def preempted(self, request_id: str, life: Life, blocks: Sequence[KVCacheBlock]) -> None:
        """It gives up its table of blocks next. Those that are still to be copied stay until they are."""
        if why := self.why_off:
            self.give_up(request_id, why, len(life.pages(self.books.block_size)))
            return
        copies = self.books.preempt(request_id, life)
        if copies is None:
            self.give_up(request_id, Reason.HOST_FULL, len(life.pages(self.books.block_size)))
            return
        for copy in copies:
            self._store(copy, blocks[copy.page])

    def _store(self, copy: Copy, block: KVCacheBlock) -> None:
        self._pool.touch([block])
        self._stores[copy.tag] = _Store(copy, block, self._now())
        self._move_stores.append(Move(block.block_id, copy.slot, copy.tag))

    def give_up(self, request_id: str, reason: Reason, pages: int) -> None:
        """So many pages of a preempted request are lost: it will be computed again."""
        self.books.drop(request_id)
        self.counters.fell_back(reason, pages)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("a preempted request is computed again: %s; others are counted", reason.value)

    # ---- coming back

    def matched(self, request_id: str, hit_tokens: int) -> int | None:
        """Tokens that the host has beyond those that the device has, 0 if none; None: ask again, it is being copied."""
        life = self.books.life(request_id)
        if life is None:
            return 0
        pages = len(life.pages(self.books.block_size))
        if why := self.why_off:
            self.give_up(request_id, why, pages)
            return 0
        found = self.books.look_up(request_id, hit_tokens)
        if found is Missing.YET:
            return None
        if found is Missing.FOR_GOOD:
            self.give_up(request_id, Reason.COPY_LOST, pages)
            return 0
        return max(0, life.tokens - hit_tokens)

    def null_pages(self, request_id: str) -> int:
        """With which the table of a request begins that is about to be restored."""
        life = self.books.life(request_id)
        return life.first if life else 0

    def allocated(self, request: Any, blocks: Sequence[KVCacheBlock], tokens: int) -> None:
        """A request has its table; `tokens` at the end of its life are to be loaded."""
        request_id = request.request_id
        life = self.books.life(request_id)
        if life is None:
            return
        hits = life.tokens - tokens
        if not tokens:
            self.books.restored(request_id)  # the device still had all of it
        else:
            copies = self.books.look_up(request_id, hits)
            self._numbers += 1
            load = Load(request, copies, [blocks[copy.page] for copy in copies], self._now())
            for copy in copies:
                self.books.pool.begin_read(copy)
            moves = zip(load.blocks, copies, strict=True)
            self._loads[self._numbers] = load
            self._move_loads[self._numbers] = tuple(Move(b.block_id, c.slot, c.tag) for b, c in moves)
        self.counters.hit(device=hits, host=tokens)
        if life.shape is not None:
            self.take_back(request_id, life.shape)

    # ---- each step

    def step_ended(self) -> None:
        """Of the workers, whether or not they had a word to say."""
        self._outputs += 1

    def take_orders(self) -> Orders:
        stores, self._move_stores = tuple(self._move_stores), []
        loads, self._move_loads = self._move_loads, {}
        return Orders(stores, loads)

    def heard(self, word: Word) -> tuple[list[Load], list[Load], int]:
        """Loads that have ended well, those that have not, and how many blocks have come back."""
        freed = 0
        for tag, answer in word.stores.items():
            if store := self._stores.get(tag):
                store.answer = store.answer.and_also(answer)
                if store.answer.ranks == self._ranks:
                    freed += self._end_store(self._stores.pop(tag))
        good, bad = [], []
        for number, answer in word.loads.items():
            if load := self._loads.get(number):
                load.answer = load.answer.and_also(answer)
                if load.answer.ranks == self._ranks:
                    freed += self._end_load(self._loads.pop(number), good, bad)
        return good, bad, freed

    def _end_store(self, store: _Store) -> int:
        if store.answer.why_not:
            self._say_why(store.answer.why_not)
            self._no_pool |= store.answer.why_not == NO_POOL
        else:
            self.counters.stored_pages += 1
        self.books.stored(store.copy, well=not store.answer.why_not)
        return self._unpin(store)

    def _unpin(self, store: _Store) -> int:
        if store.pinned:
            store.pinned = False
            # One that no prefix hit can find is as good as empty: used first.
            self._pool.free_blocks([store.block], prepend=store.block.block_hash is None)
            return 1
        return 0

    def _end_load(self, load: Load, good: list[Load], bad: list[Load]) -> int:
        for copy in load.copies:
            self.books.pool.end_read(copy)
        if load.overdue:  # its request has gone on without it
            self._pool.free_blocks(reversed(load.blocks))
            return len(load.blocks)
        request_id = load.request.request_id
        life = self.books.life(request_id)
        if life is None:  # it has ended meanwhile, or what it was loaded is not valid any more
            bad.append(load)
        elif load.answer.why_not:
            self._say_why(load.answer.why_not)
            bad.append(load)
            self.give_up(request_id, Reason.LOAD_FAILED, len(life.pages(self.books.block_size)))
        else:
            good.append(load)
            self.counters.loaded_pages += len(load.copies)
            self.counters.restores += 1
            self.books.restored(request_id)
        return 0

    def _say_why(self, why: str) -> None:
        logger.warning_once("a copy between device and host was not made: %s", why)

    # ---- endings

    def finished(self, request_id: str) -> None:
        """It has ended, however."""
        self.books.drop(request_id)

    def forget_all(self) -> None:
        """What was computed is not valid any more (other weights): no copy may be restored, no block stays pinned."""
        for request_id in self.books.known():
            if life := self.books.life(request_id):
                self.give_up(request_id, Reason.RESET, len(life.pages(self.books.block_size)))
            self.books.drop(request_id)
        for store in self._stores.values():
            self._unpin(store)

    def overdue(self) -> list[Load]:
        """Free blocks of stores that nobody has answered for too long, and set those of such loads aside.

        The loads, whose requests have to go on without them.
        """
        late_stores = [store for store in self._stores.values() if store.pinned and self._is_overdue(store.since)]
        for store in late_stores:
            store.overdue = True
            self._unpin(store)
            self.books.lost(store.copy)
        late = [load for load in self._loads.values() if not load.overdue and self._is_overdue(load.since)]
        for load in late:
            load.overdue = True
            self._pool.touch(load.blocks)
            if life := self.books.life(load.request.request_id):
                self.give_up(load.request.request_id, Reason.NO_ANSWER, len(life.pages(self.books.block_size)))
        return late

    def _is_overdue(self, since: _Since) -> bool:
        return self._clock() - since.time_s > DEADLINE_S and self._outputs - since.outputs > DEADLINE_OUTPUTS

    @property
    def waiting(self) -> bool:
        """Whether an answer is waited for that frees blocks."""
        return any(s.pinned for s in self._stores.values()) or any(not load.overdue for load in self._loads.values())

    def pins(self) -> Iterable[int]:
        """Ids of the blocks that are held here, once for each time: for tests."""
        yield from (store.block.block_id for store in self._stores.values() if store.pinned)
        yield from (block.block_id for load in self._loads.values() if load.overdue for block in load.blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything that is being copied is known here."""
        self.books.check_integrity()
        writing = {copy.tag for copy in self.books.pool.copies() if copy.state is State.FILLING}
        reading = {copy.tag for copy in self.books.pool.copies() if copy.state is State.READING}
        assert writing == set(self._stores), "copies are written that nobody waits for"
        assert reading == {copy.tag for load in self._loads.values() for copy in load.copies}, "the same of reading"
