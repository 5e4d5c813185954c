"""In which order waiting requests start: homogeneous batches from the densest range of KV lengths, nobody forgotten.

Requests of a better priority come first, always. Among equals, those that were preempted resume first, in order of
arrival. The others start in batches, which end where the places or the blocks do. A batch is taken from the densest
range of lengths that has as many requests as fit a batch, were they all of average size: so a range of long requests,
which fill the blocks sooner, is not preferred for that. Within the range, those with the most prefix-cache hits come
first, then the older ones.

A batch passes a request over if a younger one is in it and the request is not. Who was passed over by `max_passed`
batches goes before all that were not, in order of arrival, so that no further batch passes it over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from kvcompile.schedule.length_tree import LengthRange, LengthTree


@dataclass
class _Entry:
    key: Hashable
    tokens: int
    blocks: int
    arrival: tuple[float, int]  # time and order of entry, so that no two are equal
    passed: int = 0
    resumed: bool = False


def _by_arrival(entry: _Entry) -> tuple[float, int]:
    return entry.arrival


class _Lane:
    """The waiting requests of one priority."""

    def __init__(self, order: WaitingOrder) -> None:
        self.order = order
        self.tree = LengthTree(order.max_tokens, order.leaf_tokens)
        self.fresh: dict[Hashable, _Entry] = {}  # in order of entry, which is that of arrival but for clocks
        self.leaves: dict[int, dict[Hashable, _Entry]] = {}  # number of the narrowest range -> its members
        self.resumed: dict[Hashable, _Entry] = {}
        self.blocks = 0  # of all that are fresh
        self.batch: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self.fresh) + len(self.resumed)

    def add(self, entry: _Entry) -> None:
        if entry.resumed:
            self.resumed[entry.key] = entry
            return
        self.fresh[entry.key] = entry
        self.leaves.setdefault(self.tree.range_of(entry.tokens), {})[entry.key] = entry
        self.tree.add(entry.tokens)
        self.blocks += entry.blocks

    def remove(self, entry: _Entry) -> None:
        if entry.resumed:
            del self.resumed[entry.key]
            return
        del self.fresh[entry.key]
        number = self.tree.range_of(entry.tokens)
        del self.leaves[number][entry.key]
        if not self.leaves[number]:
            del self.leaves[number]
        self.tree.remove(entry.tokens)
        self.blocks -= entry.blocks

    def first(self) -> _Entry:
        if self.resumed:
            return min(self.resumed.values(), key=_by_arrival)
        while self.batch and self.fresh.get(self.batch[0].key) is not self.batch[0]:
            self.batch.popleft()  # gone meanwhile
        if not self.batch:
            self._form_batch()
        return self.batch[0]

    def _form_batch(self) -> None:
        order = self.order
        overdue = sorted((entry for entry in self.fresh.values() if entry.passed >= order.max_passed), key=_by_arrival)
        taken, blocks = {}, 0
        for entry in (*overdue, *self._densest()):
            if len(taken) == order.places or blocks >= order.blocks:
                break
            if entry.key not in taken:
                taken[entry.key] = entry
                blocks += entry.blocks
        self.batch.extend(taken.values())
        youngest = max(entry.arrival for entry in taken.values())
        for entry in self.fresh.values():
            if entry.arrival < youngest and entry.key not in taken:
                entry.passed += 1
                order.most_passed = max(order.most_passed, entry.passed)
        order.batches += 1

    def _densest(self) -> list[_Entry]:
        """Members of the densest range, in the order in which they start."""
        order = self.order
        fitting = order.blocks * len(self.fresh) // max(1, self.blocks)
        members = sorted(self._members(self.tree.densest(max(1, min(order.places, fitting)))), key=_by_arrival)
        # Twice a batch's places are enough: of its members, no more than that many can be overdue and in it already.
        # Looking up hits takes longer than all the rest.
        candidates = members[: 2 * order.places]
        return sorted(candidates, key=lambda entry: (-order.hits(entry.key), entry.arrival))

    def _members(self, found: LengthRange) -> list[_Entry]:
        first, end = self.tree.range_of(found.low), self.tree.range_of(found.high)
        if end - first > len(self.leaves):
            numbers = [number for number in self.leaves if first <= number < end]
        else:
            numbers = [number for number in range(first, end) if number in self.leaves]
        return [entry for number in numbers for entry in self.leaves[number].values()]


class WaitingOrder:
    """The waiting requests, by key.

    max_tokens: longest KV length. leaf_tokens: lengths that differ by less may be alike. places, blocks: of a batch.
    max_passed: batches that may pass a request over. hits(key): tokens of it in the prefix cache.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        leaf_tokens: int,
        places: int,
        blocks: int,
        max_passed: int,
        hits: Callable[[Hashable], int] = lambda key: 0,
    ) -> None:
        self.max_tokens, self.leaf_tokens, self.places, self.blocks = max_tokens, leaf_tokens, places, blocks
        self.max_passed, self.hits = max_passed, hits
        self.batches = self.most_passed = 0  # batches formed, and the most that have passed one request over
        self._entries: dict[Hashable, tuple[int, _Entry]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        """Every key, once: by priority, those to resume first, then by entry. Not the order of `first`."""
        for priority in sorted(self._lanes):
            lane = self._lanes[priority]
            yield from (entry.key for entry in sorted(lane.resumed.values(), key=_by_arrival))
            yield from lane.fresh

    def add(
        self, key: Hashable, *, tokens: int, blocks: int, arrival: float, priority: int = 0, resumed: bool = False
    ) -> None:
        """Let a request wait. tokens: KV that it will hold when it starts; blocks: for that."""
        if key in self._entries:
            raise KeyError(f"{key!r} waits already")
        self._serial += 1
        entry = _Entry(key, tokens, blocks, (arrival, self._serial), resumed=resumed)
        self._entries[key] = priority, entry
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = _Lane(self)
        lane.add(entry)

    def remove(self, key: Hashable) -> None:
        """Take a request out: it starts, or its client went away. KeyError if it does not wait."""
        priority, entry = self._entries.pop(key)
        lane = self._lanes[priority]
        lane.remove(entry)
        if not lane:
            del self._lanes[priority]

    def first(self) -> Hashable:
        """Who is next; the same until the set changes. IndexError if nobody waits."""
        if not self._lanes:
            raise IndexError("no request waits")
        return self._lanes[min(self._lanes)].first().key

    def passed(self, key: Hashable) -> int:
        """Batches that have passed this request over."""
        return self._entries[key][1].passed
