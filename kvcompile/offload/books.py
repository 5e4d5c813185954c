"""Which pages of which request have a copy on the host, and what a preempted request needs to come back.

A running request may have copies of its full pages, made ahead of need. Preempted, all its pages have one, or the
request is given up: it is computed again. Restored, it keeps the copies of its full pages, which do not change; that of
its last page does not survive the next token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcompile.offload.host_pool import Copy, HostPool, State


@dataclass(frozen=True)
class Life:
    """A request when it was preempted.

    tokens: positions whose keys and values it held. first: its first page that is no null block. shape: what its pages
    mean (whether, and how, it had been pruned): pages that were copied under another shape are not its own any more.
    """

    tokens: int
    first: int
    shape: Any = None

    def pages(self, block_size: int) -> range:
        return range(self.first, -(-self.tokens // block_size))


class Missing(enum.Enum):
    """Why a request cannot be restored now."""

    YET = "copies are under way"
    FOR_GOOD = "a page has no copy"


class Books:
    """Of all requests."""

    def __init__(self, pool: HostPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self._copies: dict[str, dict[int, Copy]] = {}
        self._shapes: dict[str, Any] = {}
        self._lives: dict[str, Life] = {}

    def life(self, request_id: str) -> Life | None:
        """Of a request that was preempted and saved, until it is restored or given up."""
        return self._lives.get(request_id)

    def copied(self, request_id: str) -> int:
        """How many pages of a request have a copy, or will when it is written."""
        return len(self._copies.get(request_id, ()))

    def has_copy(self, request_id: str, page: int) -> bool:
        return page in self._copies.get(request_id, ())

    def reshape(self, request_id: str, shape: Any) -> None:
        """Its pages mean this now: copies from before that go."""
        if request_id in self._copies and self._shapes[request_id] != shape:
            self.drop(request_id)
        self._shapes[request_id] = shape

    def back_up(self, request_id: str, page: int) -> Copy | None:
        """A copy to be filled with a full page of a running request; None if no slot is free."""
        return self._copy(request_id, page, (page + 1) * self.block_size)

    def _copy(self, request_id: str, page: int, end: int) -> Copy | None:
        copy = self.pool.take(request_id, page, end)
        if copy is not None:
            self._copies.setdefault(request_id, {})[page] = copy
        return copy

    def preempt(self, request_id: str, life: Life) -> list[Copy] | None:
        """Copies to be filled now, so that every page has one. None if there is no room: then it has none at all."""
        self.reshape(request_id, life.shape)
        copies, pages = self._copies.get(request_id, {}), life.pages(self.block_size)
        ends = {page: min((page + 1) * self.block_size, life.tokens) for page in pages}
        for page in [page for page, copy in copies.items() if copy.end != ends.get(page)]:
            self._forget(request_id, page)
        missing = [page for page in pages if page not in copies]
        if not self._make_room(len(missing), request_id):
            self.drop(request_id)
            return None
        self._lives[request_id] = life
        return [copy for page in missing if (copy := self._copy(request_id, page, ends[page]))]

    def _make_room(self, slots: int, request_id: str) -> bool:
        """Take slots from running requests, which can do without, never from preempted ones."""
        if slots <= self.pool.free:
            return True
        spare = list(self._spare(request_id))
        if self.pool.free + len(spare) < slots:
            return False
        for copy in spare[: slots - self.pool.free]:
            self._forget(copy.owner, copy.page)
        return True

    def _spare(self, request_id: str) -> Iterator[Copy]:
        """Copies that can be given up at once; a request's last pages first."""
        for owner, copies in self._copies.items():
            if owner != request_id and owner not in self._lives:
                yield from (copies[page] for page in sorted(copies, reverse=True) if copies[page].state is State.READY)

    def look_up(self, request_id: str, hit_tokens: int) -> list[Copy] | Missing:
        """What a preempted request needs from the host: its pages in order, of which the device has the first tokens.

        hit_tokens: a multiple of the block size. Raises KeyError for a request that has no life.
        """
        life, copies = self._lives[request_id], self._copies.get(request_id, {})
        needed = [page for page in life.pages(self.block_size) if page >= hit_tokens // self.block_size]
        if not all(page in copies for page in needed):
            return Missing.FOR_GOOD
        found = [copies[page] for page in needed]
        return found if all(copy.state is State.READY for copy in found) else Missing.YET

    def stored(self, copy: Copy, *, well: bool) -> None:
        """A copy has been written, or could not be."""
        if not well:
            self.lost(copy)
        self.pool.filled(copy, well=well)

    def lost(self, copy: Copy) -> None:
        """Nobody says whether it has been written: its slot is set aside until somebody does."""
        if not copy.dropped:
            self._forget(copy.owner, copy.page)

    def restored(self, request_id: str) -> None:
        """It runs again."""
        life = self._lives.pop(request_id)
        if life.tokens % self.block_size and self.has_copy(request_id, life.tokens // self.block_size):
            self._forget(request_id, life.tokens // self.block_size)

    def _forget(self, request_id: str, page: int) -> None:
        copies = self._copies[request_id]
        self.pool.release(copies.pop(page))
        if not copies:
            del self._copies[request_id]

    def drop(self, request_id: str) -> None:
        """It has ended, or is computed again."""
        self._lives.pop(request_id, None)
        self._shapes.pop(request_id, None)
        for copy in self._copies.pop(request_id, {}).values():
            self.pool.release(copy)

    def known(self) -> set[str]:
        """Requests of which anything is kept."""
        return {*self._lives, *self._shapes, *self._copies}

    def check_integrity(self) -> None:
        """Raise AssertionError unless books and pool agree."""
        self.pool.check_integrity()
        ours = {id(copy) for copies in self._copies.values() for copy in copies.values()}
        theirs = {id(copy) for copy in self.pool.copies() if not copy.dropped}
        assert ours == theirs, f"{len(theirs - ours)} copies are nobody's, {len(ours - theirs)} are not in the pool"
        for request_id, copies in self._copies.items():
            assert copies, f"{request_id} is kept without a copy"
            assert request_id in self._shapes, f"{request_id} has copies of pages of no shape"
            wrong = [c for page, c in copies.items() if (c.owner, c.page) != (request_id, page)]
            assert not wrong, f"{request_id} has copies of others: {wrong}"
        for request_id, life in self._lives.items():
            extra = set(self._copies.get(request_id, ())) - set(life.pages(self.block_size))
            assert not extra, f"{request_id} has copies of pages {extra} that it does not have"
