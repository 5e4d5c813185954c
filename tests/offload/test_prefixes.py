"""The host as a second prefix cache: what is kept of requests that have ended, who finds it, and what goes first."""

from __future__ import annotations

import pytest

from kvcompile.offload.books import Books, Life
from kvcompile.offload.host_pool import Copy, HostPool

BLOCK = 16


def _books(slots: int = 10) -> Books:
    return Books(HostPool(slots), BLOCK)


def _ended(books: Books, request_id: str, keys: list[str | None], *, well: bool = True) -> list[Copy]:
    """A request has run, was copied page by page, and has ended."""
    books.reshape(request_id, None)
    copies = [books.back_up(request_id, page, key) for page, key in enumerate(keys)]
    for copy in copies:
        if copy:
            books.stored(copy, well=well)
    books.finish(request_id)
    books.check_integrity()
    return copies


def _kept(books: Books) -> list[str]:
    return [copy.key for copy in books.prefixes.kept()]


def test_what_others_can_use_stays_and_the_rest_goes() -> None:
    books = _books()
    copies = _ended(books, "a", ["x", "xy", None])
    assert books.prefixes.run(["x", "xy", "xyz"]) == copies[:2]
    assert books.pool.free == 8
    assert not books.known()


def test_a_run_ends_at_the_first_page_that_is_not_there_or_is_still_being_written() -> None:
    books = _books()
    _ended(books, "a", ["x", "xy", "xyz"])
    assert len(books.prefixes.run(["x", "other", "xyz"])) == 1
    assert books.prefixes.run(["other", "x"]) == []
    writing = books.keep(3, "xyz1")
    assert len(books.prefixes.run(["x", "xy", "xyz", "xyz1"])) == 3
    books.stored(writing, well=True)
    assert len(books.prefixes.run(["x", "xy", "xyz", "xyz1"])) == 4


def test_a_request_that_runs_or_was_preempted_is_found_by_others_too() -> None:
    books = _books()
    books.reshape("running", None)
    books.stored(books.back_up("running", 0, "x"), well=True)
    for copy in books.preempt("preempted", Life(tokens=20, first=0), ["y", "not full, so not this"]):
        books.stored(copy, well=True)
    assert len(books.prefixes.run(["x"])) == len(books.prefixes.run(["y"])) == 1
    assert books.prefixes.run(["not full, so not this"]) == []
    assert not _kept(books)


def test_one_that_could_not_be_written_is_not_found() -> None:
    books = _books()
    _ended(books, "a", ["x", "xy"], well=False)
    copy = books.keep(0, "x")
    books.stored(copy, well=False)
    assert books.prefixes.run(["x"]) == []
    assert books.pool.free == 10


def test_the_same_content_is_kept_once_and_counts_as_used() -> None:
    books = _books()
    _ended(books, "a", ["x"])
    _ended(books, "b", ["y"])
    books.reshape("c", None)
    books.reshape("d", None)
    adopted = books.back_up("c", 0, "x")
    assert adopted is None and books.has_copy("c", 0)  # no copy was made
    second = books.back_up("d", 0, "x")  # the first one has an owner
    books.stored(second, well=True)
    books.finish("c")
    books.finish("d")
    assert _kept(books) == ["y", "x"]
    assert books.pool.free == 8
    books.check_integrity()


def test_the_least_recently_used_go_first_and_of_one_request_the_last_pages() -> None:
    books = _books(slots=5)
    _ended(books, "a", ["x", "xy"])
    _ended(books, "b", ["u", "uv", "uvw"])
    books.prefixes.used(["x", "xy"])
    gone = []
    for page in range(4):
        before = set(_kept(books))
        books.stored(books.keep(page, f"new {page}"), well=True)
        gone += before - set(_kept(books))
    assert gone == ["uvw", "uv", "u", "xy"]


def test_what_has_ended_makes_room_for_preempted_requests_before_running_ones_do() -> None:
    books = _books(slots=4)
    _ended(books, "ended", ["x", "xy"])
    books.reshape("running", None)
    for page in range(2):
        books.stored(books.back_up("running", page, None), well=True)
    assert len(books.preempt("a", Life(tokens=32, first=0))) == 2
    assert books.copied("running") == 2 and not _kept(books)
    assert len(books.preempt("b", Life(tokens=16, first=0))) == 1
    assert books.copied("running") == 1 and books.copied("a") == 2
    books.check_integrity()


def test_a_preempted_request_takes_over_what_is_kept_of_its_content_and_copies_the_rest() -> None:
    books = _books()
    kept = _ended(books, "ended", ["x", "xy"])
    rest = books.preempt("a", Life(tokens=50, first=0), ["x", "xy", "xyz", None])
    assert [copy.page for copy in rest] == [2, 3]
    for copy in rest:
        books.stored(copy, well=True)
    assert books.look_up("a", 0) == [*kept, *rest]
    assert not _kept(books)


def test_a_preempted_request_without_room_leaves_what_others_can_use() -> None:
    books = _books(slots=2)
    books.reshape("a", None)
    books.stored(books.back_up("a", 0, "x"), well=True)
    assert books.preempt("a", Life(tokens=48, first=0), ["x", "xy", "xyz"]) is None
    assert _kept(books) == ["x"]
    books.check_integrity()


def test_a_slot_that_several_read_is_free_when_the_last_has_read_it() -> None:
    books = _books(slots=1)
    (copy,) = _ended(books, "a", ["x"])
    books.pool.begin_read(copy)
    books.pool.begin_read(copy)
    assert books.prefixes.run(["x"]) == [copy]
    books.drop_prefixes()
    assert books.prefixes.run(["x"]) == []
    books.pool.end_read(copy)
    assert books.pool.free == 0
    books.pool.end_read(copy)
    assert books.pool.free == 1


def test_what_is_being_read_is_not_given_up_for_anything() -> None:
    books = _books(slots=1)
    (copy,) = _ended(books, "a", ["x"])
    books.pool.begin_read(copy)
    assert books.keep(0, "y") is None
    assert books.preempt("b", Life(tokens=16, first=0)) is None
    assert books.prefixes.run(["x"]) == [copy]


def test_what_could_not_be_loaded_is_found_by_nobody_any_more_but_its_owner() -> None:
    books = _books()
    (kept,) = _ended(books, "ended", ["x"])
    (own,) = books.preempt("a", Life(tokens=32, first=1), [None, "xy"])
    books.stored(own, well=True)
    books.distrust([kept, own])
    assert books.prefixes.run(["x"]) == books.prefixes.run(["xy"]) == []
    assert books.look_up("a", 0) == [own]
    assert books.pool.free == 9
    books.finish("a")
    assert not _kept(books)
    books.check_integrity()


def test_what_a_running_request_has_of_it_is_not_found_either_when_that_has_ended() -> None:
    books = _books()
    books.reshape("running", None)
    copy = books.back_up("running", 0, "x")
    books.stored(copy, well=True)
    books.distrust([copy])
    assert not books.has_copy("running", 0)
    books.finish("running", ["x"])
    assert books.prefixes.run(["x"]) == []
    assert books.pool.free == 10
    books.check_integrity()


@pytest.mark.parametrize("hidden", ["kept", "owned"])
def test_of_two_copies_of_the_same_content_the_other_is_found_when_one_goes(hidden: str) -> None:
    books = _books()
    books.reshape("running", None)
    owned = books.back_up("running", 0, "x")
    books.stored(owned, well=True)
    books.reshape("ended", None)
    kept = books.back_up("ended", 0, "x")
    books.stored(kept, well=True)
    books.finish("ended")
    if hidden == "kept":
        books.drop_prefixes()
    else:
        books.drop("running")
    assert books.prefixes.run(["x"]) == [owned if hidden == "kept" else kept]
    books.check_integrity()
