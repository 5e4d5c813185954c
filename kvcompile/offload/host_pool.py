"""The slots of the host pool: each is free, or holds one page of KV cache.

    FREE -> FILLING -> READY <-> READING
              |          |          |
              +----------+----------+--> FREE

A slot that is being written or read is never given to somebody else: released then, it is free once the copy has ended.
Several may read it at once.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass


class State(enum.Enum):
    """Of a copy; a slot without one is free."""

    FILLING = "filling"
    READY = "ready"
    READING = "reading"


@dataclass(eq=False, slots=True)
class Copy:
    """One page in one slot.

    tag: names this content, no other copy ever has it. owner: the request whose page it is; None: it is kept for
    whoever begins with the same tokens. page: column of a block table; positions [page * block_size, end). key: names
    what a full page holds by the tokens up to its end, so that others find it; None: nobody else may use it. dropped:
    nobody wants it any more, though it is still being written or read.
    """

    slot: int
    tag: int
    owner: str | None
    page: int
    end: int
    key: Hashable = None
    state: State = State.FILLING
    readers: int = 0
    dropped: bool = False


class HostPool:
    """A fixed number of slots, one page each."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a host pool has {slots} slots; allowed is at least 1")
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._tags = 0
        self._copies: dict[int, Copy] = {}  # by slot

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: str | None, page: int, end: int, key: Hashable = None) -> Copy | None:
        """A slot to be filled with this page; None if there is none."""
        if not self._free:
            return None
        self._tags += 1
        copy = Copy(self._free.pop(), self._tags, owner, page, end, key)
        self._copies[copy.slot] = copy
        return copy

    def filled(self, copy: Copy, *, well: bool) -> None:
        """Writing has ended, well or not."""
        self._expect(copy, State.FILLING)
        copy.state = State.READY
        if copy.dropped or not well:
            self._give_back(copy)

    def begin_read(self, copy: Copy) -> None:
        self._expect(copy, State.READY, State.READING)
        copy.state = State.READING
        copy.readers += 1

    def end_read(self, copy: Copy) -> None:
        self._expect(copy, State.READING)
        copy.readers -= 1
        if copy.readers:
            return
        copy.state = State.READY
        if copy.dropped:
            self._give_back(copy)

    def release(self, copy: Copy) -> None:
        """Nobody wants it any more."""
        if copy.state is State.READY:
            self._give_back(copy)
        else:
            copy.dropped = True

    def _give_back(self, copy: Copy) -> None:
        copy.dropped = True
        del self._copies[copy.slot]
        self._free.append(copy.slot)

    def _expect(self, copy: Copy, state: State, *others: State) -> None:
        if self._copies.get(copy.slot) is not copy or copy.state not in (state, *others):
            raise ValueError(f"{copy} is not {state.value} in this pool")

    def copies(self) -> list[Copy]:
        """All that slots hold, dropped ones too."""
        return list(self._copies.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or holds one copy, and no page has two that are wanted."""
        assert sorted([*self._free, *self._copies]) == list(range(self.slots)), "slots are lost or given twice"
        assert all(copy.slot == slot for slot, copy in self._copies.items()), "a copy is in another's slot"
        held = list(self._copies.values())
        assert not [copy for copy in held if copy.dropped and copy.state is State.READY], "a dropped copy was kept"
        assert all(bool(copy.readers) == (copy.state is State.READING) for copy in held), "readers are miscounted"
        wanted = (copy for copy in held if not copy.dropped)
        names = Counter((c.owner, c.page if c.owner is not None else c.key) for c in wanted)
        twice = [name for name, count in names.items() if count > 1]
        assert not twice, f"pages have two copies: {twice}"
