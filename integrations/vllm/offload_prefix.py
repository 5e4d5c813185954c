"""The host as a second level of vLLM's prefix cache: what a request that begins finds behind the device's hits.

What is there: copies of preempted and running requests, and those of requests that have ended, as long as nobody needs
their slots. Where blocks are short, running requests are copied ahead of need anyway, so that most of what ends has its
copies. Where they are not, the link is idle, and what has ended without is copied then, so much of it in a step, while
it is still on the device; it is never pinned where that could cost another request its blocks. What pruning gives up in
front of a prompt counts as ended; what it has rewritten has no hash, and is nobody's prefix.

A run of blocks is loaded as a preempted request is, by vLLM's asynchronous load: all of it, or none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash

from kvcompile.integrations.vllm.offload_transfers import Transfers
from kvcompile.offload.books import Books
from kvcompile.offload.host_pool import Copy

MOST_ENDED = 1 << 16  # blocks that are remembered to be copied later


class _Run(NamedTuple):
    request_id: str
    hit_tokens: int
    copies: list[Copy]


class _Ended(NamedTuple):
    """A page of a request that has ended. keys: of that request's pages, in order. last: of those to be copied."""

    block: KVCacheBlock
    page: int
    keys: list[bytes]
    last: bool


class HostPrefix:
    """most_hits(request): tokens that one about to be admitted may have from others; where it is pruned, fewer."""

    def __init__(self, books: Books, transfers: Transfers) -> None:
        self._books, self._transfers = books, transfers
        self.most_hits: Callable[[Any], int] = lambda request: 0
        self._run: _Run | None = None  # of whom vLLM asked last
        self._ended: OrderedDict[bytes, _Ended] = OrderedDict()  # by key

    def found(self, request: Any, hit_tokens: int) -> int:
        """Tokens of whole blocks, behind the first ones that the device has."""
        size = self._books.block_size
        wanted = slice(hit_tokens // size, self.most_hits(request) // size)
        copies = self._books.prefixes.run(request.block_hashes[wanted])
        self._run = _Run(request.request_id, hit_tokens, copies)
        return len(copies) * size

    def begin(self, request: Any, blocks: Sequence[KVCacheBlock], tokens: int) -> int | None:
        """Load so many tokens into its table. If nothing is to be loaded: tokens that the device had of it.

        None, too, of a request that has begun before: one whose load has come.
        """
        run, self._run = self._run, None
        if request.num_computed_tokens or run is None or run.request_id != request.request_id:
            return None
        if not tokens:
            return run.hit_tokens
        first = run.hit_tokens // self._books.block_size
        self._books.prefixes.used([copy.key for copy in run.copies])
        self._transfers.load(request, run.copies, list(blocks[first : first + len(run.copies)]), run.hit_tokens)
        return None

    def ended(self, blocks: Sequence[KVCacheBlock]) -> None:
        """What a request that ends holds of what others can use is copied later, if there is time.

        No more than the host has slots: its own first pages would make room for the last.
        """
        keys: list[bytes] = []
        new: dict[bytes, tuple[KVCacheBlock, int]] = {}
        for page, block in enumerate(blocks[: self._books.pool.slots]):
            if (key := key_of(block)) is None:
                continue
            keys.append(key)
            if key not in self._books.prefixes:
                new[key] = block, page
        last = next(reversed(new), None)
        for key, (block, page) in new.items():
            self._ended[key] = _Ended(block, page, keys, key == last)
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def copy_ended(self, most_pages: int) -> None:
        """Copy as much of it, at most, as is still on the device and in nobody's hands."""
        while self._ended and most_pages > 0:
            key, (block, page, keys, last) = self._ended.popitem(last=False)
            # Whoever holds the block may be computing it in this very step.
            if not block.ref_cnt and key_of(block) == key and key not in self._books.prefixes:
                copy = self._books.keep(page, key)
                if copy is None:
                    self._books.prefixes.used(keys)
                    return
                self._transfers.store(copy, block)
                most_pages -= 1
            if last:
                # The first pages were copied first, and are good without the last ones: those go before them.
                self._books.prefixes.used(keys)

    def forget(self) -> None:
        self._ended.clear()
        self._run = None


def key_of(block: KVCacheBlock) -> bytes | None:
    """Under which others find what a block holds; None if it may be rewritten, is not full, or nothing is cached."""
    return None if block.block_hash is None else get_block_hash(block.block_hash)
