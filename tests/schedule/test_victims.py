"""Who goes first when blocks run out."""

from __future__ import annotations

import itertools
import random

import pytest

from kvcompile.schedule.victims import Stake, keep_order


def test_the_last_is_the_one_that_loses_least() -> None:
    kept = keep_order([Stake(0, 10, 1.0), Stake(0, 500, 2.0), Stake(0, 3, 0.0)], lambda stake: stake)
    assert [stake.lost_tokens for stake in kept] == [500, 10, 3]


def test_what_the_host_has_a_copy_of_is_not_lost() -> None:
    computed, saved = {"a": 900, "b": 100}, {"a": 896, "b": 0}
    kept = keep_order("ab", lambda name: Stake(0, computed[name] - saved[name], 0.0))
    assert kept == ["b", "a"]


def test_a_better_priority_is_kept_whatever_it_loses() -> None:
    kept = keep_order([Stake(5, 10_000, 0.0), Stake(-1, 1, 9.0)], lambda stake: stake)
    assert [stake.priority for stake in kept] == [-1, 5]


def test_of_two_that_lose_the_same_the_later_one_goes() -> None:
    kept = keep_order([Stake(0, 7, 2.0), Stake(0, 7, 1.0)], lambda stake: stake)
    assert [stake.arrival for stake in kept] == [1.0, 2.0]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_victims_lose_less(seed: int) -> None:
    rng = random.Random(seed)
    running = [Stake(0, rng.randrange(1000), float(i)) for i in range(7)]
    for count in range(1, 7):
        lost = sum(stake.lost_tokens for stake in keep_order(running, lambda stake: stake)[-count:])
        assert lost == min(sum(s.lost_tokens for s in some) for some in itertools.combinations(running, count))
