"""The host pool: a slot holds one page, and is nobody's only when nothing is copied to or from it."""

from __future__ import annotations

import random

import pytest

from kvcompile.offload.host_pool import Copy, HostPool, State


def test_a_pool_gives_as_many_slots_as_it_has_and_no_more() -> None:
    pool = HostPool(3)
    copies = [pool.take("a", page, 16 * page + 16) for page in range(3)]
    assert {copy.slot for copy in copies} == {0, 1, 2}
    assert pool.take("a", 3, 64) is None
    assert pool.free == 0


def test_a_pool_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots; allowed is at least 1"):
        HostPool(0)


def test_every_content_has_a_tag_of_its_own() -> None:
    pool, tags = HostPool(1), set()
    for _ in range(10):
        copy = pool.take("a", 0, 16)
        tags.add(copy.tag)
        pool.filled(copy, well=True)
        pool.release(copy)
    assert len(tags) == 10


@pytest.mark.parametrize("well", [True, False])
def test_a_slot_that_is_being_written_is_free_only_after_that(well: bool) -> None:
    pool = HostPool(1)
    copy = pool.take("a", 0, 16)
    pool.release(copy)
    assert pool.free == 0
    pool.filled(copy, well=well)
    assert pool.free == 1


def test_a_slot_that_is_being_read_is_free_only_after_that() -> None:
    pool = HostPool(1)
    copy = pool.take("a", 0, 16)
    pool.filled(copy, well=True)
    pool.begin_read(copy)
    pool.release(copy)
    assert pool.free == 0
    pool.end_read(copy)
    assert pool.free == 1


def test_what_could_not_be_written_is_free() -> None:
    pool = HostPool(1)
    pool.filled(pool.take("a", 0, 16), well=False)
    assert pool.free == 1


def test_a_step_out_of_order_is_an_error_that_names_the_copy() -> None:
    pool = HostPool(2)
    copy = pool.take("a", 0, 16)
    with pytest.raises(ValueError, match="owner='a'.* is not ready in this pool"):
        pool.begin_read(copy)
    pool.filled(copy, well=True)
    with pytest.raises(ValueError, match="is not filling"):
        pool.filled(copy, well=True)
    with pytest.raises(ValueError, match="is not reading"):
        pool.end_read(copy)
    pool.release(copy)
    with pytest.raises(ValueError, match="is not ready"):
        pool.begin_read(copy)


@pytest.mark.parametrize("seed", range(20))
def test_slots_add_up_whatever_is_done(seed: int) -> None:
    rng, pool = random.Random(seed), HostPool(rng_slots := random.Random(seed).randint(1, 12))
    held: list[Copy] = []
    for page in range(400):
        copy = rng.choice(held) if held else None
        action = rng.randrange(5)
        if action == 0 and (taken := pool.take("a", page, 16 * page + 16)):
            held.append(taken)
        elif action == 1 and copy and copy.state is State.FILLING:
            pool.filled(copy, well=rng.random() < 0.8)
        elif action == 2 and copy and copy.state is State.READY and not copy.dropped:
            pool.begin_read(copy)
        elif action == 3 and copy and copy.state is State.READING:
            pool.end_read(copy)
        elif action == 4 and copy and not copy.dropped:
            pool.release(copy)
        held = [each for each in held if not (each.dropped and each.state is State.READY)]
        pool.check_integrity()
        assert pool.free + len(held) == rng_slots
