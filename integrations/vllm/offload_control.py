"""The scheduler's half of the offload connector: what is saved and restored, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvcompile.integrations.vllm.offload_messages import NO_POOL, Word
from kvcompile.integrations.vllm.offload_prefix import HostPrefix, key_of
from kvcompile.integrations.vllm.offload_transfers import Load, Store, Transfers
from kvcompile.offload.books import Books, Life, Missing
from kvcompile.offload.counters import Counters, Reason

logger = init_logger("vllm.kvcompile")


class OffloadControl:
    """`books` and the blocks of a device pool, for workers of so many ranks.

    take_back(request_id, shape): a request whose life had a shape has its table, and goes on as it was.
    """

    def __init__(self, books: Books, page_bytes: int, ranks: int = 1) -> None:
        self.books, self.counters = books, Counters(page_bytes)
        self.transfers = Transfers(lambda: self.books.pool, ranks)
        self.prefix = HostPrefix(books, self.transfers)
        self.take_back: Callable[[str, Any], None] = lambda request_id, shape: None
        self._no_pool = False
        self._said: set[Reason] = set()

    def bind(self, pool: BlockPool) -> None:
        self.transfers.bind(pool)

    @property
    def why_off(self) -> Reason | None:
        """Why nothing is copied now; None if it is."""
        if self._no_pool:
            return Reason.NO_POOL
        return Reason.SWITCHED_OFF if self.transfers.late else None

    # ---- saving

    def back_up(self, request_id: str, page: int, block: KVCacheBlock) -> None:
        """Copy a full page of a running request, if it has no copy and a slot is free."""
        if copy := self.books.back_up(request_id, page, key_of(block)):
            self.transfers.store(copy, block)

    def preempted(self, request_id: str, life: Life, blocks: Sequence[KVCacheBlock]) -> None:
        """It gives up its table of blocks next. Those that are still to be copied stay until they are."""
        if why := self.why_off:
            self.give_up(request_id, why, self._pages(life))
            return
        copies = self.books.preempt(request_id, life, list(map(key_of, blocks)))
        if copies is None:
            self.give_up(request_id, Reason.HOST_FULL, self._pages(life))
            return
        for copy in copies:
            self.transfers.store(copy, blocks[copy.page])

    def give_up(self, request_id: str, reason: Reason, pages: int) -> None:
        """So many pages of a preempted request are lost: it will be computed again."""
        self.books.drop(request_id)
        self._fell_back(reason, pages)

    def _fell_back(self, reason: Reason, pages: int = 0) -> None:
        self.counters.fell_back(reason, pages)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("a request is computed again: %s; others are counted", reason.value)

    def _pages(self, life: Life) -> int:
        return len(life.pages(self.books.block_size))

    # ---- coming back, and beginning

    def matched(self, request: Any, hit_tokens: int) -> int | None:
        """Tokens that the host has beyond those that the device has, 0 if none; None: ask again, it is being copied."""
        life = self.books.life(request.request_id)
        if life is None:
            return 0 if self.why_off else self.prefix.found(request, hit_tokens)
        return self.can_restore(request.request_id, life, hit_tokens)

    def can_restore(self, request_id: str, life: Life, hit_tokens: int) -> int | None:
        """The same of a preempted request that was saved; one that cannot be restored is given up: 0."""
        if why := self.why_off:
            self.give_up(request_id, why, self._pages(life))
            return 0
        found = self.books.look_up(request_id, hit_tokens)
        if found is Missing.YET:
            return None
        if found is Missing.FOR_GOOD:
            self.give_up(request_id, Reason.COPY_LOST, self._pages(life))
            return 0
        return max(0, life.tokens - hit_tokens)

    def null_pages(self, request_id: str) -> int:
        """With which the table of a request begins that is about to be restored."""
        life = self.books.life(request_id)
        return life.first if life else 0

    def allocated(self, request: Any, blocks: Sequence[KVCacheBlock], tokens: int) -> None:
        """A request has its table; `tokens` behind those that the device had are to be loaded."""
        request_id = request.request_id
        life = self.books.life(request_id)
        if life is None:
            if (hits := self.prefix.begin(request, blocks, tokens)) is not None:
                self.counters.prefix_hit(device=hits, host=0)
            return
        hits = life.tokens - tokens
        if not tokens:
            self.books.restored(request_id)  # the device still had all of it
        else:
            copies = self.books.look_up(request_id, hits)
            self.transfers.load(request, copies, [blocks[copy.page] for copy in copies])
        self.counters.hit(device=hits, host=tokens)
        if life.shape is not None:
            self.take_back(request_id, life.shape)

    # ---- what workers have said

    def heard(self, word: Word) -> tuple[list[Load], list[Load], int]:
        """Loads that have ended well, those that have not, and how many blocks have come back."""
        # The last pages first, as vLLM frees them: what is freed first is taken first, and no hit gets past a gap.
        stores = sorted(self.transfers.stores_ended(word), key=lambda store: store.copy.page, reverse=True)
        freed = sum(map(self._end_store, stores))
        good, bad = [], []
        for load in self.transfers.loads_ended(word):
            if load.aside:  # its request has gone on without it
                freed += self.transfers.give_back(load)
            else:
                (good if self._end_load(load) else bad).append(load)
        return good, bad, freed

    def _end_store(self, store: Store) -> int:
        if why := store.answer.why_not:
            self._say_why(why)
            self._no_pool |= why == NO_POOL
        else:
            self.counters.stored_pages += 1
        self.books.stored(store.copy, well=not why)
        return self.transfers.unpin(store)

    def _end_load(self, load: Load) -> bool:
        """Whether its request can go on from it."""
        request_id = load.request.request_id
        life = self.books.life(request_id)
        if load.void:
            return False
        if load.answer.why_not:
            self._say_why(load.answer.why_not)
            if life is None:
                self.books.distrust(load.copies)
                self._fell_back(Reason.PREFIX_NOT_LOADED)
            else:
                self.give_up(request_id, Reason.LOAD_FAILED, self._pages(life))
            return False
        self.counters.loaded_pages += len(load.copies)
        if life is None:
            self.counters.prefix_hit(device=load.prefix_hits, host=len(load.copies) * self.books.block_size)
        else:
            self.counters.restores += 1
            self.books.restored(request_id)
        return True

    def _say_why(self, why: str) -> None:
        logger.warning_once("a copy between device and host was not made: %s", why)

    def overdue(self) -> list[Load]:
        """Give up what nobody has answered for too long. The loads whose requests have to go on without them."""
        for store in self.transfers.stores_overdue():
            self.books.lost(store.copy)
        late = self.transfers.loads_overdue()
        for load in late:
            if life := self.books.life(load.request.request_id):
                self.give_up(load.request.request_id, Reason.NO_ANSWER, self._pages(life))
            elif not load.void:
                self._fell_back(Reason.NO_ANSWER)
        return late

    # ---- endings

    def finished(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """It has ended, however, and gives up its table of blocks next, if it has one."""
        self.books.finish(request_id, list(map(key_of, blocks)))
        if not self.why_off:
            self.prefix.ended(blocks)

    def forget_all(self) -> None:
        """What was computed is not valid any more (other weights): no copy is used, nor what is being loaded.

        Blocks are held until what copies them has ended, as ever.
        """
        for request_id in self.books.known():
            if life := self.books.life(request_id):
                self.give_up(request_id, Reason.RESET, self._pages(life))
            self.books.drop(request_id)
        self.books.drop_prefixes()
        self.prefix.forget()
        for load in self.transfers.void():
            if load.prefix_hits is not None:  # restores, which have none, have just been counted
                self._fell_back(Reason.RESET)

    def pins(self) -> Iterable[int]:
        """Ids of the blocks that copies hold, once for each time: for tests."""
        return self.transfers.pins()

    def check_integrity(self) -> None:
        """Raise AssertionError unless books, pools and what is under way agree."""
        self.books.check_integrity()
        self.transfers.check_integrity()
