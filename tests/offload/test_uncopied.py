"""Pages without a copy are found in order, and at a cost that does not depend on how many have one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Container, Iterator
from itertools import islice

import pytest

from kvcompile.offload import backup
from kvcompile.offload.backup import Candidate
from kvcompile.offload.books import Books, Life
from kvcompile.offload.host_pool import HostPool
from kvcompile.offload.uncopied import Uncopied


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_a_look_at_every_page_finds(seed: int) -> None:
    rng = random.Random(seed)
    first, pages = rng.randint(0, 5), rng.randint(5, 40)
    uncopied, copied = Uncopied(), set()
    for _ in range(300):
        match rng.randrange(4):
            case 0:  # what nobody else may do: copy a page that was not the next
                copied.add(rng.randint(first, pages))
            case 1 if copied:
                lost = rng.choice(sorted(copied))
                copied.remove(lost)
                uncopied.lost(lost)
            case 2:
                copied.update(islice(uncopied.pages(range(first, pages), copied), rng.randint(0, 5)))
            case 3 if rng.random() < 0.1:
                copied.update(range(first, pages))
                uncopied.reached(pages)
        among = range(first, rng.randint(first, pages))
        some = list(islice(uncopied.pages(among, copied), rng.randint(0, 3)))
        assert some == [page for page in among if page not in copied][: len(some)]
        assert list(uncopied.pages(among, copied)) == [page for page in among if page not in copied]
        pages += rng.random() < 0.2


class _Counted:
    def __init__(self, copied: Container[int]) -> None:
        self._copied = copied

    def __contains__(self, page: object) -> bool:
        _Looks.count += 1
        return page in self._copied


class _Looks(Uncopied):
    """Counts the pages that are looked at."""

    count = 0

    def pages(self, among: range, copied: Container[int]) -> Iterator[int]:
        return super().pages(among, _Counted(copied))


@pytest.mark.parametrize("lost", [0.0, 0.2], ids=["well", "losing copies"])
def test_a_long_request_costs_no_more_looks_in_a_step_than_pages_are_copied_in_one(
    monkeypatch: pytest.MonkeyPatch, lost: float
) -> None:
    """20000 pages, 8 a step, each written two steps later: all are copied, and none is looked at for nothing."""
    monkeypatch.setattr("kvcompile.offload.books.Uncopied", _Looks)
    rng, size, most = random.Random(0), 16, 8
    books = Books(HostPool(30_000), size)
    books.reshape("long", None)
    candidate, writing, looks = Candidate("long", range(3, 20_000)), deque([[], []]), []
    while books.copied("long") < len(candidate.pages) or any(writing):
        _Looks.count = 0
        writing.append([books.back_up(*each) for each in backup.plan([candidate], books, 1, most)])
        looks.append(_Looks.count)
        for copy in writing.popleft():
            books.stored(copy, well=rng.random() >= lost)
        assert len(looks) < 2 * 20_000 / most, "too little is copied in a step"
    assert max(looks) <= 4 * most
    assert sum(looks) < 3 * 20_000


def test_after_a_restore_only_what_has_come_since_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.offload.books.Uncopied", _Looks)
    books = Books(HostPool(2000), 16)
    for copy in books.preempt("a", Life(tokens=16 * 1000 + 5, first=0)):
        books.stored(copy, well=True)
    books.restored("a")
    _Looks.count = 0
    assert backup.plan([Candidate("a", range(1002))], books, 1, 8) == [("a", 1000), ("a", 1001)]
    assert _Looks.count < 4
