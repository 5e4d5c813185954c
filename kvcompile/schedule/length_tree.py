"""A quad-tree over KV length: how many waiting requests, and how many of their blocks, lie in which range of lengths.

    level 0   [0 ................................................ 4^L * leaf)
    level 1   [0 ........)[ ............)[ ............)[ ............ )
    level 2   [..)[..)[..)[..)  ...                                        each range is four of the next level

A range *fills a batch* if its requests take all of a batch's places or all of its blocks. The densest range has the most
requests per token of its width among those that do: a batch from it is as homogeneous as the waiting requests allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class LengthRange(NamedTuple):
    """Lengths of low to high - 1 tokens, how many requests are in it and the blocks that they take."""

    low: int
    high: int
    requests: int
    blocks: int

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
        # One table per level, widest range first: number of the range -> [requests, blocks].
        self._tables: list[dict[int, list[int]]] = [{} for _ in range(self.levels)]

    def __len__(self) -> int:
        return self._tables[0][0][0] if self._tables[0] else 0

    def add(self, tokens: int, blocks: int) -> None:
        """Count one request of that length. O(levels)."""
        self._change(tokens, 1, blocks)

    def remove(self, tokens: int, blocks: int) -> None:
        """Undo `add` of the same values; a request that was never added is a KeyError."""
        self._change(tokens, -1, -blocks)

    def range_of(self, tokens: int) -> int:
        """The number of the narrowest range that holds this length; numbers increase with length."""
        return tokens // self.leaf_tokens

    def _change(self, tokens: int, requests: int, blocks: int) -> None:
        number = self.range_of(tokens)
        for table in reversed(self._tables):
            counts = table[number] if requests < 0 else table.setdefault(number, [0, 0])
            counts[0] += requests
            counts[1] += blocks
            if not counts[0]:
                del table[number]
            number //= 4

    def densest(self, places: int, blocks: int) -> list[LengthRange]:
        """The densest ranges that fill a batch of so many places and blocks, by length.

        Several if equally dense, but none that holds another of them: the narrower one is more homogeneous. If even the
        widest range does not fill a batch, it alone; none if nothing waits. A range that does not fill a batch holds
        none that does, so only ranges that do, and their parts, are looked at: O(levels * requests / requests of a batch).
        """
        if not self._tables[0]:
            return []
        best, most = (
            [(0, 0)],
            self._tables[0][0][0],
        )  # `most`: requests in a range of the widest width, were it as dense
        frontier = [0] if _fills(self._tables[0][0], places, blocks) else []
        for level in range(1, self.levels):
            table = self._tables[level]
            inside = (4 * number + part for number in frontier for part in range(4))
            frontier = [number for number in inside if number in table and _fills(table[number], places, blocks)]
            for number in frontier:
                scaled = table[number][0] * 4**level
                if scaled > most:
                    best, most = [], scaled
                if scaled == most:
                    best.append((level, number))
        outer = {(level - up, number // 4**up) for level, number in best for up in range(1, level + 1)}
        return sorted(self._range(*found) for found in best if found not in outer)

    def ranges(self) -> Iterator[LengthRange]:
        """Every range that holds a request, widest first."""
        for level, table in enumerate(self._tables):
            for number in sorted(table):
                yield self._range(level, number)

    def _range(self, level: int, number: int) -> LengthRange:
        width = self.leaf_tokens * 4 ** (self.levels - 1 - level)
        return LengthRange(number * width, (number + 1) * width, *self._tables[level][number])


def _fills(counts: list[int], places: int, blocks: int) -> bool:
    return counts[0] >= places or counts[1] >= blocks
