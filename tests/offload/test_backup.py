"""Preventive backup: whose pages are copied ahead of need, which, and how many."""

from __future__ import annotations

from kvcompile.offload import backup
from kvcompile.offload.backup import Candidate
from kvcompile.offload.books import Books, Life
from kvcompile.offload.host_pool import HostPool

VICTIMS = [Candidate("first", range(3)), Candidate("second", range(2, 6)), Candidate("third", range(5))]


def _books(copied: dict[str, int], slots: int = 100) -> Books:
    books = Books(HostPool(slots), 16)
    for request_id in (*copied, *(each.request_id for each in VICTIMS)):
        books.reshape(request_id, None)
    for request_id, pages in copied.items():
        for page in range(pages):
            books.stored(books.back_up(request_id, page), well=True)
    return books


def test_the_likeliest_victims_pages_are_copied_first_and_their_coldest_before_others() -> None:
    assert backup.plan(VICTIMS, _books({}), 3, 5) == [
        ("first", 0), ("first", 1), ("first", 2), ("second", 2), ("second", 3)
    ]  # fmt: skip


def test_pages_that_have_a_copy_are_left_out() -> None:
    assert backup.plan(VICTIMS, _books({"first": 2}), 1, 9) == [("first", 2)]


def test_no_more_requests_are_looked_at_than_asked_but_for_those_that_are_copied_whole() -> None:
    assert {name for name, _ in backup.plan(VICTIMS, _books({"first": 3}), 1, 9)} == {"second"}


def test_a_full_host_pool_takes_nothing_and_one_that_is_nearly_full_what_it_can() -> None:
    assert backup.plan(VICTIMS, _books({"other": 4}, slots=4), 3, 9) == []
    assert backup.plan(VICTIMS, _books({"other": 4}, slots=6), 3, 9) == [("first", 0), ("first", 1)]


def test_nothing_is_planned_for_nobody_or_for_no_page() -> None:
    assert backup.plan([], _books({}), 3, 9) == []
    assert backup.plan(VICTIMS, _books({}), 3, 0) == []
    assert backup.plan(VICTIMS, _books({}), 0, 9) == []


def test_a_page_whose_copy_is_lost_is_copied_again_before_others() -> None:
    books = _books({"first": 2, "second": 0})
    books.stored(books.back_up("first", 2), well=False)
    assert backup.plan(VICTIMS, books, 3, 1) == [("first", 2)]
    books.lost(books.back_up("first", 2))
    assert backup.plan(VICTIMS, books, 3, 1) == [("first", 2)]
    for copy in books.preempt("urgent", Life(tokens=16 * (books.pool.free + 1), first=0)):  # takes a slot of who runs
        books.stored(copy, well=True)
    assert not books.has_copy("first", 1)
    books.drop("urgent")
    assert backup.plan(VICTIMS, books, 3, 1) == [("first", 1)]
