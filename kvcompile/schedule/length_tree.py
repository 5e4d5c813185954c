"""A quad-tree over KV length: how many waiting requests there are in which range of lengths.

    level 0   [0 ................................................ 4^L * leaf)
    level 1   [0 ........)[ ............)[ ............)[ ............ )
    level 2   [..)[..)[..)[..)  ...                                        each range is four of the next level

The densest range is the one with the most requests per token of its width, among those with enough requests for a
batch: a batch from it is as homogeneous as those who wait allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class LengthRange(NamedTuple):
    """Lengths of low to high - 1 tokens, and how many requests have one of them."""

    low: int
    high: int
    requests: int

    @property
    def density(self) -> float:
        """Requests per token of width."""
        return self.requests / (self.high - self.low)


class LengthTree:
    """Counts of requests by length. Ranges without requests take no memory.

    max_tokens: the longest length there can be. leaf_tokens: the width of the narrowest ranges.
    """

    def __init__(self, max_tokens: int, leaf_tokens: int) -> None:
        self.leaf_tokens = leaf_tokens
        self.levels = 1
        while leaf_tokens * 4 ** (self.levels - 1) <= max_tokens:
            self.levels += 1
        # One table per level, widest range first: number of the range -> requests.
        self._tables: list[dict[int, int]] = [{} for _ in range(self.levels)]

    def __len__(self) -> int:
        return self._tables[0].get(0, 0)

    def add(self, tokens: int) -> None:
        """Count one request of that length. O(levels)."""
        number = self.range_of(tokens)
        for table in reversed(self._tables):
            table[number] = table.get(number, 0) + 1
            number //= 4

    def remove(self, tokens: int) -> None:
        """Undo one `add` of the same length. KeyError if there was none."""
        number = self.range_of(tokens)
        for table in reversed(self._tables):
            table[number] -= 1
            if not table[number]:
                del table[number]
            number //= 4

    def range_of(self, tokens: int) -> int:
        """The number of the narrowest range that holds this length; numbers increase with length."""
        return tokens // self.leaf_tokens

    def densest(self, batch: int) -> LengthRange | None:
        """The densest range with at least `batch` requests; the widest if none has so many, None if nothing waits.

        Of equally dense ranges the narrower one, then that of the shorter lengths. A range with too few requests holds
        none with enough, so only ranges with enough, and their parts, are looked at: O(levels * requests / batch).
        """
        if not self._tables[0]:
            return None
        level_of_best = best = 0
        most = self._tables[0][0]  # requests that the widest range would have, were it as dense as the best
        frontier = [0] if most >= batch else []
        for level in range(1, self.levels):
            table = self._tables[level]
            inside = (4 * number + part for number in frontier for part in range(4))
            frontier = [number for number in inside if table.get(number, 0) >= batch]
            for number in frontier:
                scaled = table[number] * 4**level
                if scaled > most or (scaled == most and level > level_of_best):
                    level_of_best, best, most = level, number, scaled
        return self._range(level_of_best, best)

    def ranges(self) -> Iterator[LengthRange]:
        """Every range that holds a request, widest first."""
        for level, table in enumerate(self._tables):
            for number in sorted(table):
                yield self._range(level, number)

    def _range(self, level: int, number: int) -> LengthRange:
        width = self.leaf_tokens * 4 ** (self.levels - 1 - level)
        return LengthRange(number * width, (number + 1) * width, self._tables[level][number])
