"""Which pages of a request have no copy yet, without a look at all those that have.

Pages are copied in order, the coldest first, and a long request has thousands that never change again. So a mark is
kept up to which all have a copy, but for gaps:

    page      0  1  2  3  4  5  6  7  8
    copy      x  x  -  x  x  x  -  -  -      mark 6, gaps {2}: to be copied are 2, 6, 7 and 8

It moves on over what has been copied since when somebody looks, and back when the last page before it is lost; another
one that is lost is a gap until it has been copied again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator


class Uncopied:
    """Of one request."""

    def __init__(self) -> None:
        self._mark = 0
        self._gaps: set[int] = set()

    def pages(self, among: range, copied: Container[int]) -> Iterator[int]:
        """Those of `among` that are not in `copied`, in order. Each look costs as much as has changed since the last,
        and as many pages as are taken.
        """
        for page in sorted(self._gaps):
            if page in copied:
                self._gaps.discard(page)
            elif page in among:
                yield page
        self._mark = max(self._mark, among.start)
        for page in range(self._mark, among.stop):
            if page in copied:
                self._gaps.update(range(self._mark, page))
                self._mark = page + 1
            else:
                yield page

    def reached(self, page: int) -> None:
        """All before it have a copy now."""
        self._gaps.clear()
        self._mark = page

    def lost(self, page: int) -> None:
        """It had a copy and has none any more."""
        if page == self._mark - 1:
            self._mark = page
            self._gaps.discard(page)
        elif page < self._mark:
            self._gaps.add(page)
