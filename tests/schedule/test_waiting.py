"""The order of waiting requests: homogeneous batches, ties, priorities, and that nobody is passed over too often."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcompile.schedule.waiting import WaitingOrder


def _order(places: int = 4, blocks: int = 10**9, max_passed: int = 8, **more) -> WaitingOrder:
    return WaitingOrder(max_tokens=4096, leaf_tokens=16, places=places, blocks=blocks, max_passed=max_passed, **more)


def _add(order: WaitingOrder, key: object, tokens: int, arrival: float = 0.0, **more) -> None:
    order.add(key, tokens=tokens, blocks=-(-tokens // 16), arrival=arrival, **more)


def _take(order: WaitingOrder, count: int) -> list:
    taken = []
    for _ in range(count):
        taken.append(order.first())
        order.remove(taken[-1])
    return taken


def test_fewer_than_a_batch_start_in_the_order_of_arrival() -> None:
    order = _order()
    for key, tokens, arrival in [("a", 9, 2.0), ("b", 4000, 1.0), ("c", 500, 3.0)]:
        _add(order, key, tokens, arrival)
    assert _take(order, 3) == ["b", "a", "c"]


def test_a_batch_is_of_the_densest_lengths() -> None:
    order = _order()
    for i in range(12):
        _add(order, f"far{i}", 100 + 300 * i, float(i))
    for i in range(4):
        _add(order, f"near{i}", 2000 + i, 100.0 + i)
    assert _take(order, 4) == ["near0", "near1", "near2", "near3"]


def test_a_batch_ends_where_its_blocks_do() -> None:
    order = _order(places=100, blocks=40)
    for i in range(6):
        _add(order, i, 320, float(i))  # 20 blocks each
    assert order.first() == 0
    assert [entry.key for entry in order._lanes[0].batch] == [0, 1]


def test_a_range_of_long_requests_is_not_preferred_for_filling_the_blocks_sooner() -> None:
    order = _order(places=100, blocks=500)
    for i in range(6):
        _add(order, f"long{i}", 4000, float(i))
    for i in range(30):
        _add(order, f"short{i}", 100 + i % 8, 10.0 + i)
    # 250 blocks each: two of the long ones would fill a batch, of all on average eleven do.
    assert order.first() == "short0"


def test_what_arrives_meanwhile_waits_for_the_next_batch() -> None:
    order = _order(places=2)
    for i in range(2):
        _add(order, i, 100, float(i))
    assert order.first() == 0
    _add(order, "new", 100, -5.0)
    assert _take(order, 3) == [0, 1, "new"]


def test_within_a_range_those_with_more_prefix_hits_come_first_and_then_by_arrival() -> None:
    hits = {"a": 0, "b": 32, "c": 32, "d": 64}
    order = _order(hits=hits.get)
    for key, arrival in [("a", 0.0), ("c", 3.0), ("b", 2.0), ("d", 9.0)]:
        _add(order, key, 300, arrival)
    assert _take(order, 4) == ["d", "b", "c", "a"]


def test_hits_are_looked_up_for_few_more_than_fit_a_batch() -> None:
    asked = Counter()
    order = _order(places=3, hits=lambda key: asked.update([key]) or 0)
    for i in range(100):
        _add(order, i, 300, float(i))
    assert order.first() == 0
    assert sorted(asked) == list(range(6))


def test_who_was_preempted_goes_first_by_arrival() -> None:
    order = _order()
    for i in range(8):
        _add(order, i, 300, float(i))
    assert order.first() == 0
    _add(order, "late", 900, 50.0, resumed=True)
    _add(order, "early", 3000, 40.0, resumed=True)
    assert _take(order, 3) == ["early", "late", 0]


def test_a_better_priority_goes_before_all_others_preempted_ones_too() -> None:
    order = _order()
    _add(order, "low", 300, 0.0, priority=5)
    _add(order, "low again", 300, 0.0, priority=5, resumed=True)
    assert order.first() == "low again"
    _add(order, "high", 4000, 9.0, priority=-1)
    _add(order, "middle", 10, 0.0)
    assert _take(order, 4) == ["high", "middle", "low again", "low"]


def test_who_went_away_is_not_next() -> None:
    order = _order()
    for i in range(4):
        _add(order, i, 300, float(i))
    assert order.first() == 0
    order.remove(0)
    order.remove(1)
    assert order.first() == 2
    assert len(order) == 2
    assert set(order) == {2, 3}


def test_a_key_that_went_away_and_came_back_is_a_new_one() -> None:
    order = _order()
    for i in range(4):
        _add(order, i, 300, float(i))
    assert order.first() == 0
    order.remove(0)
    _add(order, 0, 300, 7.0)
    assert _take(order, 4) == [1, 2, 3, 0]


def test_nobody_waits() -> None:
    order = _order()
    with pytest.raises(IndexError):
        order.first()
    with pytest.raises(KeyError):
        order.remove("a")
    _add(order, "a", 5)
    with pytest.raises(KeyError, match="waits already"):
        _add(order, "a", 5)


def _starts_under_a_flood(max_passed: int, batches: int) -> tuple[list, WaitingOrder]:
    """A few long requests of all lengths, then batch after batch of younger short ones that are always denser."""
    order, started = _order(places=4, max_passed=max_passed), []
    for i in range(6):
        _add(order, f"long{i}", 600 * (i + 1), float(i))
    for batch in range(batches):
        for i in range(4):
            _add(order, f"short{batch}.{i}", 100 + i, 100.0 + batch)
        started += _take(order, 4)
    return started, order


@pytest.mark.parametrize("max_passed", [1, 2, 5, 20])
def test_a_flood_of_denser_requests_passes_nobody_more_often_than_the_bound(max_passed: int) -> None:
    started, _ = _starts_under_a_flood(max_passed, 30)
    assert all(key.startswith("short") for key in started[: 4 * max_passed])
    assert started[4 * max_passed : 4 * max_passed + 6] == [f"long{i}" for i in range(6)]


def test_with_no_bound_the_flood_would_starve_them() -> None:
    started, order = _starts_under_a_flood(10**6, 30)
    assert not any(key.startswith("long") for key in started)
    assert order.passed("long0") == 30


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_and_goes_everybody_starts_once_and_is_passed_by_no_more_batches_than_the_bound(
    seed: int,
) -> None:
    """`passed` is checked against counting: batches, cut from the order of starts, that had a younger member."""
    rng = random.Random(seed)
    max_passed, places = rng.choice([1, 3, 8]), rng.choice([1, 3, 10])
    order = _order(places=places, blocks=rng.choice([60, 10**9]), max_passed=max_passed)
    arrivals: dict[int, float] = {}
    waiting: dict[int, int] = {}  # key -> batches that passed it over, by counting
    started: list[int] = []
    gone: set[int] = set()
    seen = 0
    for step in range(400):
        for _ in range(rng.choice([0, 0, 1, 3, 9])):
            key = len(arrivals)
            arrivals[key] = float(step)
            waiting[key] = 0
            _add(order, key, rng.choice([rng.randrange(1, 4096), 100 + rng.randrange(30)]), arrivals[key])
        if waiting and rng.random() < 0.1:
            key = rng.choice(sorted(waiting))
            del waiting[key]
            gone.add(key)
            order.remove(key)
        for _ in range(rng.choice([0, 1, 2])):
            if not waiting:
                break
            key = order.first()
            if order.batches > seen:
                seen = order.batches
                batch = {entry.key for entry in order._lanes[0].batch}
                youngest = max((arrivals[k], k) for k in batch)
                for other in waiting:
                    waiting[other] += other not in batch and (arrivals[other], other) < youngest
            assert waiting[key] <= max_passed
            order.remove(key)
            started.append(key)
            del waiting[key]
        assert all(order.passed(key) == count <= max_passed for key, count in waiting.items())
    started += _take(order, len(order))
    assert sorted([*started, *gone]) == sorted(arrivals)
