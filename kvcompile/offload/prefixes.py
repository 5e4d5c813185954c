"""Copies that are found by what they hold: the host as a second level of the prefix cache.

A copy has a key if its page is full and was never rewritten: the hash by which vLLM's own prefix cache would find it,
of all tokens up to its end (and of the adapter and salt). Of all copies with a key one can be found. Those of requests
that have ended are kept as long as nobody needs their slots, and given up in the order of their last use, of one
request the last pages first: those in front of them are what they are good for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from kvcompile.offload.host_pool import Copy, State


class Prefixes:
    """By key: one copy that can be found, and, of those that nobody owns, the one that is kept."""

    def __init__(self) -> None:
        self._shown: dict[Hashable, Copy] = {}
        self._kept: OrderedDict[Hashable, Copy] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a copy, or will be when it is written."""
        return key in self._shown

    def kept(self) -> list[Copy]:
        return list(self._kept.values())

    def show(self, copy: Copy) -> None:
        """It can be found from now on, unless another one of the same content already is."""
        if copy.key is not None:
            self._shown.setdefault(copy.key, copy)

    def hide(self, copy: Copy) -> None:
        """It is about to be released, or is not to be trusted: not found, and not kept, any more."""
        if self._kept.get(copy.key) is copy:
            del self._kept[copy.key]
        if self._shown.get(copy.key) is copy:
            del self._shown[copy.key]
            if other := self._kept.get(copy.key):
                self.show(other)

    def keep(self, copy: Copy) -> bool:
        """Of a request that has ended. False, and it is not needed, if the same content is kept already."""
        if copy.key in self._kept:
            self._kept.move_to_end(copy.key)
            self.hide(copy)
            return False
        self.show(copy)
        self._kept[copy.key] = copy
        return True

    def run(self, keys: Sequence[Hashable]) -> list[Copy]:
        """Copies that can be read now, of as many of these in order as have one without a gap."""
        found = []
        for key in keys:
            copy = self._shown.get(key)
            if copy is None or copy.state is State.FILLING:
                break
            found.append(copy)
        return found

    def used(self, keys: Sequence[Hashable]) -> None:
        """Those of one request, in order."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)

    def adopt(self, key: Hashable) -> Copy | None:
        """A whole copy that is kept and has an owner from now on; None if there is none."""
        copy = self._kept.get(key)
        if copy is None or copy.state is State.FILLING:
            return None
        return self._kept.pop(key)

    def oldest(self) -> Iterable[Copy]:
        """Those kept whose slots can be had at once, least recently used first."""
        return (copy for copy in self._kept.values() if copy.state is State.READY)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all is under its own key."""
        for copies in (self._shown, self._kept):
            wrong = [copy for key, copy in copies.items() if key is None or copy.key != key or copy.dropped]
            assert not wrong, f"copies are found that do not hold what is wanted: {wrong}"
        owned = [copy for copy in self._kept.values() if copy.owner is not None]
        assert not owned, f"copies are kept that have an owner: {owned}"
        assert self._kept.keys() <= self._shown.keys(), "copies are kept that nobody finds"
