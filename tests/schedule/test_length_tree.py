"""The quad-tree over lengths against counting, and its search against looking at every range."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from kvcompile.schedule.length_tree import LengthRange, LengthTree

LEAF = 16


def _every_range(levels: int, lengths: list[int]) -> list[LengthRange]:
    """Each range of the tree that holds a request, by counting."""
    found = []
    for level in range(levels):
        width = LEAF * 4**level
        for number in {tokens // width for tokens in lengths}:
            inside = sum(tokens // width == number for tokens in lengths)
            found.append(LengthRange(number * width, (number + 1) * width, inside))
    return found


def _densest_by_looking_at_all(ranges: list[LengthRange], batch: int) -> LengthRange | None:
    widest = max(ranges, key=lambda r: r.high - r.low, default=None)
    enough = [r for r in ranges if r.requests >= batch]
    return max(enough, key=lambda r: (Fraction(r.requests, r.high - r.low), r.low - r.high, -r.low), default=widest)


def _lengths(rng: random.Random, count: int) -> list[int]:
    kind = rng.choice(["uniform", "short", "equal", "clusters"])
    most = {"uniform": 4000, "short": 200, "equal": 1, "clusters": 4000}[kind]
    centres = [rng.randrange(most) for _ in range(3)]
    if kind == "clusters":
        return [rng.choice(centres) + rng.randrange(40) for _ in range(count)]
    return [rng.randrange(most) for _ in range(count)]


def _tree(lengths: list[int], max_tokens: int = 4096) -> LengthTree:
    tree = LengthTree(max_tokens, LEAF)
    for tokens in lengths:
        tree.add(tokens)
    return tree


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_what_looking_at_every_range_finds(seed: int) -> None:
    rng = random.Random(seed)
    lengths = _lengths(rng, rng.choice([1, 2, 5, 30, 200]))
    tree = _tree(lengths)
    every = _every_range(tree.levels, lengths)
    for batch in (1, 2, 4, 16, 64, 10**9):
        assert tree.densest(batch) == _densest_by_looking_at_all(every, batch)


@pytest.mark.parametrize("seed", range(10))
def test_the_counts_are_those_of_counting_after_any_additions_and_removals(seed: int) -> None:
    rng = random.Random(seed)
    tree, inside = LengthTree(4096, LEAF), []
    for _ in range(300):
        if inside and rng.random() < 0.45:
            tree.remove(inside.pop(rng.randrange(len(inside))))
        else:
            inside.append(_lengths(rng, 1)[0])
            tree.add(inside[-1])
        assert len(tree) == len(inside)
    assert sorted(tree.ranges()) == sorted(_every_range(tree.levels, inside))


def test_a_tree_from_which_all_were_removed_holds_no_range() -> None:
    tree = _tree([5, 900])
    tree.remove(5)
    tree.remove(900)
    assert list(tree.ranges()) == []
    assert tree.densest(1) is None


def test_removing_what_was_not_added_is_an_error() -> None:
    with pytest.raises(KeyError):
        _tree([5]).remove(900)


@pytest.mark.parametrize(("most", "levels"), [(1, 1), (15, 1), (16, 2), (63, 2), (64, 3), (131072, 8)])
def test_the_widest_range_holds_the_longest_length(most: int, levels: int) -> None:
    tree = _tree([most], most)
    assert tree.levels == levels
    assert tree.densest(10**9).high > most


def test_of_equally_dense_ranges_the_narrowest_and_shortest_is_taken() -> None:
    # Four requests, one in each of the four narrowest ranges of one wider: all five are equally dense.
    assert _tree([16, 0, 32, 48]).densest(1) == LengthRange(0, 16, 1)


def test_a_dense_range_without_enough_requests_is_not_taken() -> None:
    tree = _tree([5] * 7 + [1024 + 16 * i for i in range(16)])
    assert tree.densest(8) == LengthRange(1024, 1280, 16)
    assert tree.densest(7) == LengthRange(0, 16, 7)
