"""Which pages of which request have a copy on the host, and what a preempted request needs to come back.

A running request may have copies of its full pages, made ahead of need. Preempted, all its pages have one, or the
request is given up: it is computed again. Restored, it keeps the copies of its full pages, which do not change; that of
its last page does not survive the next token. When it has ended, those that others can use are kept (`prefixes`).

Slots are taken, where none is free, from kept copies first; for a preempted request then from running ones, which can
do without. Never from other preempted requests: the one that finds no room is the one that is computed again.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import Any

from kvcompile.offload.host_pool import Copy, HostPool, State
from kvcompile.offload.prefixes import Prefixes
from kvcompile.offload.uncopied import Uncopied


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
    """Of all requests. keys, where they are given: of the pages of a table from the first on; None for one without."""

    def __init__(self, pool: HostPool, block_size: int) -> None:
        self.pool, self.block_size, self.prefixes = pool, block_size, Prefixes()
        self._copies: dict[str, dict[int, Copy]] = {}
        self._shapes: dict[str, Any] = {}
        self._uncopied: dict[str, Uncopied] = {}
        self._lives: dict[str, Life] = {}

    def life(self, request_id: str) -> Life | None:
        """Of a request that was preempted and saved, until it is restored or given up."""
        return self._lives.get(request_id)

    def copied(self, request_id: str) -> int:
        """How many pages of a request have a copy, or will when it is written."""
        return len(self._copies.get(request_id, ()))

    def copied_pages(self, request_id: str) -> KeysView[int]:
        """Those, as they were copied: the first pages first."""
        return self._copies.get(request_id, {}).keys()

    def uncopied_pages(self, request_id: str, among: range) -> Iterator[int]:
        """The others of these, in order. Of a request whose shape is known."""
        return self._uncopied[request_id].pages(among, self._copies.get(request_id, ()))

    def has_copy(self, request_id: str, page: int) -> bool:
        return page in self._copies.get(request_id, ())

    @property
    def room(self) -> int:
        """Slots that copies of running and ended requests may take."""
        return self.pool.free + len(self.prefixes)

    def reshape(self, request_id: str, shape: Any) -> None:
        """Its pages mean this now: copies from before that go."""
        if request_id in self._copies and self._shapes[request_id] != shape:
            self.drop(request_id)
        self._shapes[request_id] = shape
        self._uncopied.setdefault(request_id, Uncopied())

    # ---- copies that are made

    def back_up(self, request_id: str, page: int, key: Hashable = None) -> Copy | None:
        """A copy to be filled with a full page of a running request; None if it has one now, or there is no slot."""
        if self._adopt(request_id, page, key):
            return None
        return self._copy(request_id, page, (page + 1) * self.block_size, key)

    def keep(self, page: int, key: Hashable) -> Copy | None:
        """A copy to be filled with a full page that nobody owns; None if there is one, or no slot."""
        copy = None if key in self.prefixes else self._take(None, page, (page + 1) * self.block_size, key)
        if copy is not None:
            self.prefixes.keep(copy)
        return copy

    def _adopt(self, request_id: str, page: int, key: Hashable) -> bool:
        copy = None if key is None else self.prefixes.adopt(key)
        if copy is None:
            return False
        copy.owner, copy.page = request_id, page
        self._copies.setdefault(request_id, {})[page] = copy
        return True

    def _copy(self, request_id: str, page: int, end: int, key: Hashable = None) -> Copy | None:
        copy = self._take(request_id, page, end, key)
        if copy is not None:
            self._copies.setdefault(request_id, {})[page] = copy
            self.prefixes.show(copy)
        return copy

    def _take(self, owner: str | None, page: int, end: int, key: Hashable) -> Copy | None:
        if not self.pool.free and (oldest := next(iter(self.prefixes.oldest()), None)):
            self._forget(oldest)
        return self.pool.take(owner, page, end, key)

    def preempt(self, request_id: str, life: Life, keys: Sequence[Hashable] = ()) -> list[Copy] | None:
        """Copies to be filled now, so that every page has one. None if there is no room: it is as if it had ended."""
        self.reshape(request_id, life.shape)
        pages, size = life.pages(self.block_size), self.block_size
        ends = {page: min((page + 1) * size, life.tokens) for page in pages}
        for page, copy in list(self._copies.get(request_id, {}).items()):
            if copy.end != ends.get(page):
                self._forget(copy)
        of_full = {page: keys[page] for page in pages if page < len(keys) and ends[page] == (page + 1) * size}
        missing = [page for page in pages if not self.has_copy(request_id, page)]
        missing = [page for page in missing if not self._adopt(request_id, page, of_full.get(page))]
        if not self._make_room(len(missing), request_id):
            self.finish(request_id)
            return None
        self._lives[request_id] = life
        copies = [copy for page in missing if (copy := self._copy(request_id, page, ends[page], of_full.get(page)))]
        self._uncopied[request_id].reached(life.tokens // size)
        return copies

    def _make_room(self, slots: int, request_id: str) -> bool:
        if slots <= self.pool.free:
            return True
        spare = [*self.prefixes.oldest(), *self._spare(request_id)]
        if self.pool.free + len(spare) < slots:
            return False
        for copy in spare[: slots - self.pool.free]:
            self._forget(copy)
        return True

    def _spare(self, request_id: str) -> Iterator[Copy]:
        """Copies of running requests that can be given up at once; a request's last pages first."""
        for owner, copies in self._copies.items():
            if owner != request_id and owner not in self._lives:
                yield from (copies[page] for page in sorted(copies, reverse=True) if copies[page].state is State.READY)

    # ---- what has become of them

    def stored(self, copy: Copy, *, well: bool) -> None:
        """A copy has been written, or could not be."""
        if not well:
            self.lost(copy)
        self.pool.filled(copy, well=well)

    def lost(self, copy: Copy) -> None:
        """Nobody says whether it has been written: its slot is set aside until somebody does."""
        if not copy.dropped:
            self._forget(copy)

    def _forget(self, copy: Copy) -> None:
        self.prefixes.hide(copy)
        if copy.owner is not None:
            copies = self._copies[copy.owner]
            del copies[copy.page]
            if not copies:
                del self._copies[copy.owner]
            self._uncopied[copy.owner].lost(copy.page)
        self.pool.release(copy)

    def distrust(self, copies: Sequence[Copy]) -> None:
        """Nobody else may use these any more; a preempted request finds out by itself whether its own are good."""
        for copy in copies:
            if copy.dropped:
                continue
            if copy.owner in self._lives:
                self.prefixes.hide(copy)
                copy.key = None
            else:  # who runs can do without; when it ends they would be found again, unread
                self._forget(copy)

    # ---- requests that come back, or end

    def look_up(self, request_id: str, hit_tokens: int) -> list[Copy] | Missing:
        """What a preempted request needs from the host: its pages in order, of which the device has the first tokens.

        hit_tokens: a multiple of the block size. Raises KeyError for a request that has no life.
        """
        life, copies = self._lives[request_id], self._copies.get(request_id, {})
        needed = [page for page in life.pages(self.block_size) if page >= hit_tokens // self.block_size]
        if not all(page in copies for page in needed):
            return Missing.FOR_GOOD
        found = [copies[page] for page in needed]
        return Missing.YET if any(copy.state is State.FILLING for copy in found) else found

    def restored(self, request_id: str) -> None:
        """It runs again."""
        life = self._lives.pop(request_id)
        if life.tokens % self.block_size and self.has_copy(request_id, life.tokens // self.block_size):
            self._forget(self._copies[request_id][life.tokens // self.block_size])

    def finish(self, request_id: str, keys: Sequence[Hashable] = ()) -> None:
        """It has ended: what others can use of it is kept."""
        for page, copy in sorted(self._end(request_id).items(), reverse=True):  # the last are used least
            copy.owner = None
            if copy.key is None and page < len(keys) and copy.end == (page + 1) * self.block_size:
                copy.key = keys[page]
            if copy.key is None or not self.prefixes.keep(copy):
                self.pool.release(copy)

    def drop(self, request_id: str) -> None:
        """It is computed again, and nothing of it is kept."""
        for copy in self._end(request_id).values():
            self.prefixes.hide(copy)
            self.pool.release(copy)

    def _end(self, request_id: str) -> dict[int, Copy]:
        """Forget the request. The copies that it had."""
        for of_request in (self._lives, self._shapes, self._uncopied):
            of_request.pop(request_id, None)
        return self._copies.pop(request_id, {})

    def drop_prefixes(self) -> None:
        """Of all that have ended."""
        for copy in self.prefixes.kept():
            self._forget(copy)

    def known(self) -> set[str]:
        """Requests of which anything is kept."""
        return {*self._lives, *self._shapes, *self._copies}

    def check_integrity(self) -> None:
        """Raise AssertionError unless books and pool agree."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        ours = {id(copy) for copies in self._copies.values() for copy in copies.values()}
        ours |= {id(copy) for copy in self.prefixes.kept()}
        theirs = {id(copy) for copy in self.pool.copies() if not copy.dropped}
        assert ours == theirs, f"{len(theirs - ours)} copies are nobody's, {len(ours - theirs)} are not in the pool"
        for request_id, copies in self._copies.items():
            assert copies, f"{request_id} is kept without a copy"
            assert request_id in self._shapes, f"{request_id} has copies of pages of no shape"
            wrong = [c for page, c in copies.items() if (c.owner, c.page) != (request_id, page)]
            assert not wrong, f"{request_id} has copies of others: {wrong}"
        assert self._shapes.keys() == self._uncopied.keys(), "copies are missing of requests of which nothing is known"
        for request_id, life in self._lives.items():
            extra = set(self._copies.get(request_id, ())) - set(life.pages(self.block_size))
            assert not extra, f"{request_id} has copies of pages {extra} that it does not have"
