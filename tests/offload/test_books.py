"""The books: which pages have a copy, and when a preempted request can come back."""

from __future__ import annotations

import random

import pytest

from kvcompile.offload.books import Books, Life, Missing
from kvcompile.offload.host_pool import Copy, HostPool, State

BLOCK = 16


def _books(slots: int = 10) -> Books:
    return Books(HostPool(slots), BLOCK)


def _back_up(books: Books, request_id: str, pages: range, shape: object = None) -> list[Copy]:
    books.reshape(request_id, shape)
    copies = [books.back_up(request_id, page) for page in pages]
    for copy in copies:
        books.stored(copy, well=True)
    return copies


def _preempted(books: Books, request_id: str, life: Life) -> list[Copy] | None:
    """It is preempted, and what is missing is copied."""
    copies = books.preempt(request_id, life)
    for copy in copies or ():
        books.stored(copy, well=True)
    return copies


def test_a_preempted_request_is_copied_whole_its_last_page_too() -> None:
    books = _books()
    copies = books.preempt("a", Life(tokens=40, first=0))
    assert [(copy.page, copy.end) for copy in copies] == [(0, 16), (1, 32), (2, 40)]
    assert books.look_up("a", 0) is Missing.YET
    for copy in copies:
        books.stored(copy, well=True)
    assert books.look_up("a", 0) == copies


def test_pages_that_have_a_copy_are_not_copied_again() -> None:
    books = _books()
    backed = _back_up(books, "a", range(2))
    rest = _preempted(books, "a", Life(tokens=40, first=0))
    assert [copy.page for copy in rest] == [2]
    assert books.look_up("a", 0) == [*backed, *rest]


def test_pages_that_the_device_still_has_are_not_needed() -> None:
    books = _books()
    copies = _preempted(books, "a", Life(tokens=40, first=0))
    assert books.look_up("a", 32) == copies[2:]
    assert books.look_up("a", 48) == []


def test_a_page_that_could_not_be_copied_has_the_request_given_up_unless_the_device_has_it() -> None:
    books = _books()
    first, *others = books.preempt("a", Life(tokens=40, first=0))
    books.stored(first, well=False)
    for copy in others:
        books.stored(copy, well=True)
    assert books.look_up("a", 0) is Missing.FOR_GOOD
    assert books.look_up("a", 16) == others


def test_null_pages_of_a_pruned_request_are_no_pages() -> None:
    books = _books()
    assert [copy.page for copy in books.preempt("a", Life(tokens=70, first=3))] == [3, 4]


def test_a_restored_request_keeps_the_copies_of_full_pages_alone() -> None:
    books = _books()
    _preempted(books, "a", Life(tokens=40, first=0))
    books.restored("a")
    assert books.life("a") is None
    assert [books.has_copy("a", page) for page in range(3)] == [True, True, False]
    assert [copy.page for copy in books.preempt("a", Life(tokens=50, first=0))] == [2, 3]


def test_a_last_page_that_was_full_is_kept() -> None:
    books = _books()
    _preempted(books, "a", Life(tokens=32, first=0))
    books.restored("a")
    assert books.copied("a") == 2


def test_pages_of_another_shape_are_not_its_own_any_more() -> None:
    books = _books()
    _back_up(books, "a", range(3), shape="whole")
    assert [copy.page for copy in books.preempt("a", Life(tokens=70, first=3, shape="pruned"))] == [3, 4]
    assert books.copied("a") == 2
    books.check_integrity()


def test_room_is_made_by_running_requests_last_pages_first() -> None:
    books = _books(slots=4)
    _back_up(books, "running", range(3))
    assert len(_preempted(books, "a", Life(tokens=32, first=0))) == 2
    assert [books.has_copy("running", page) for page in range(3)] == [True, True, False]


def test_no_room_is_made_by_preempted_requests() -> None:
    books = _books(slots=4)
    held = _preempted(books, "a", Life(tokens=48, first=0))
    assert books.preempt("b", Life(tokens=32, first=0)) is None
    assert books.look_up("a", 0) == held
    assert "b" not in books.known()
    assert books.pool.free == 1


def test_a_copy_that_is_being_written_is_not_given_up_for_another() -> None:
    books = _books(slots=2)
    books.reshape("running", None)
    books.back_up("running", 0)
    assert books.preempt("a", Life(tokens=32, first=0)) is None
    assert books.has_copy("running", 0)


def test_what_is_kept_of_a_request_goes_with_it_while_it_is_copied_too() -> None:
    books = _books()
    copies = books.preempt("a", Life(tokens=40, first=0))
    books.stored(copies[0], well=True)
    books.drop("a")
    assert not books.known()
    assert books.pool.free == 8
    for copy in copies[1:]:
        books.stored(copy, well=True)
    assert books.pool.free == 10
    books.check_integrity()


def test_a_copy_of_which_nobody_speaks_is_set_aside_until_somebody_does() -> None:
    books = _books()
    (copy,) = books.preempt("a", Life(tokens=10, first=0))
    books.lost(copy)
    assert books.look_up("a", 0) is Missing.FOR_GOOD
    assert books.pool.free == 9
    books.stored(copy, well=True)
    assert books.pool.free == 10


def _key(rng: random.Random, page: int) -> tuple[int, int] | None:
    """Some pages are of the same content."""
    return rng.choice((None, (page, 0), (page, 1)))


@pytest.mark.parametrize("seed", range(20))
def test_books_and_pool_agree_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    books = _books(slots=rng.randint(1, 30))
    tokens: dict[str, int] = {}
    writing: list[Copy] = []
    reading: dict[str, list[Copy]] = {}
    for _ in range(600):
        name = rng.choice("abcdef")
        action = rng.randrange(8)
        preempted = books.life(name) is not None
        if action == 0 and not preempted and name not in reading:
            tokens[name] = tokens.get(name, 0) + rng.randint(1, 40)
            page = rng.randrange(tokens[name] // BLOCK + 1)
            if (page + 1) * BLOCK <= tokens[name] and not books.has_copy(name, page):
                books.reshape(name, None)
                if copy := books.back_up(name, page, _key(rng, page)):
                    writing.append(copy)
        elif action == 1 and not preempted and name not in reading and tokens.get(name):
            keys = [_key(rng, page) for page in range(tokens[name] // BLOCK)]
            writing += books.preempt(name, Life(tokens[name], 0), keys) or []
        elif action == 2 and writing:
            books.stored(writing.pop(rng.randrange(len(writing))), well=rng.random() < 0.9)
        elif action == 3 and preempted and name not in reading:
            found = books.look_up(name, BLOCK * rng.randrange(3))
            if isinstance(found, list):
                assert all(copy.state is not State.FILLING and copy.owner == name for copy in found)
                for copy in found:
                    books.pool.begin_read(copy)
                reading[name] = found
            elif found is Missing.FOR_GOOD:
                books.drop(name)
        elif action == 4 and name in reading:
            for copy in reading.pop(name):
                books.pool.end_read(copy)
            if books.life(name):
                books.restored(name)
        elif action == 5 and rng.random() < 0.2:
            books.drop(name)
            tokens.pop(name, None)
        elif action == 6 and rng.random() < 0.3:
            books.finish(name, [_key(rng, page) for page in range(rng.randrange(4))])
            tokens.pop(name, None)
        elif action == 7:
            page = rng.randrange(4)
            if (key := _key(rng, page)) and (copy := books.keep(page, key)):
                writing.append(copy)
            if rng.random() < 0.2:
                books.distrust(books.prefixes.run([(0, 1), (1, 1)]))
        books.check_integrity()
        if name in books._shapes:
            wanted = [page for page in range(9) if not books.has_copy(name, page)]
            assert list(books.uncopied_pages(name, range(9))) == wanted
    for copy in writing:
        books.stored(copy, well=True)
    for copies in reading.values():
        for copy in copies:
            books.pool.end_read(copy)
    for name in books.known():
        books.drop(name)
    books.drop_prefixes()
    assert books.pool.free == books.pool.slots
