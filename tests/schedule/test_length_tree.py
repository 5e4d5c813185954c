"""The quad-tree over lengths against counting, and its search against looking at every range."""

from __future__ import annotations

import random

import pytest

from kvcompile.schedule.length_tree import LengthRange, LengthTree

LEAF = 16


def _every_range(levels: int, lengths: list[tuple[int, int]]) -> list[LengthRange]:
    """Each range of the tree that holds a request, by counting."""
    found = []
    for level in range(levels):
        width = LEAF * 4**level
        for number in {tokens // width for tokens, _ in lengths}:
            inside = [(t, b) for t, b in lengths if t // width == number]
            found.append(LengthRange(number * width, (number + 1) * width, len(inside), sum(b for _, b in inside)))
    return found


def _densest_by_looking_at_all(ranges: list[LengthRange], places: int, blocks: int) -> list[LengthRange]:
    filling = [r for r in ranges if r.requests >= places or r.blocks >= blocks]
    if not filling:
        return [max(ranges, key=lambda r: r.high - r.low)] if ranges else []
    most = max(filling, key=lambda r: r.density)
    equal = [r for r in filling if r.requests * (most.high - most.low) == most.requests * (r.high - r.low)]
    return sorted(r for r in equal if not any(o != r and r.low <= o.low and o.high <= r.high for o in equal))


def _lengths(rng: random.Random, count: int) -> list[tuple[int, int]]:
    kind = rng.choice(["uniform", "short", "equal", "clusters"])
    most = {"uniform": 4000, "short": 200, "equal": 1, "clusters": 4000}[kind]
    centres = [rng.randrange(most) for _ in range(3)]
    lengths = []
    for _ in range(count):
        tokens = rng.choice(centres) + rng.randrange(40) if kind == "clusters" else rng.randrange(most)
        lengths.append((tokens, -(-tokens // 16)))
    return lengths


def _tree(lengths: list[tuple[int, int]], max_tokens: int = 4096) -> LengthTree:
    tree = LengthTree(max_tokens, LEAF)
    for tokens, blocks in lengths:
        tree.add(tokens, blocks)
    return tree


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_what_looking_at_every_range_finds(seed: int) -> None:
    rng = random.Random(seed)
    lengths = _lengths(rng, rng.choice([1, 2, 5, 30, 200]))
    tree = _tree(lengths)
    every = _every_range(tree.levels, lengths)
    for places, blocks in [(1, 10**9), (4, 100), (16, 10**9), (10**9, 50), (64, 2000), (10**9, 10**9)]:
        assert tree.densest(places, blocks) == _densest_by_looking_at_all(every, places, blocks)


@pytest.mark.parametrize("seed", range(10))
def test_the_counts_are_those_of_counting_after_any_additions_and_removals(seed: int) -> None:
    rng = random.Random(seed)
    tree, inside = LengthTree(4096, LEAF), []
    for _ in range(300):
        if inside and rng.random() < 0.45:
            tree.remove(*inside.pop(rng.randrange(len(inside))))
        else:
            inside.append(_lengths(rng, 1)[0])
            tree.add(*inside[-1])
        assert len(tree) == len(inside)
    assert sorted(tree.ranges()) == sorted(_every_range(tree.levels, inside))


def test_a_tree_from_which_all_were_removed_holds_no_range() -> None:
    tree = _tree([(5, 1), (900, 57)])
    tree.remove(5, 1)
    tree.remove(900, 57)
    assert list(tree.ranges()) == []
    assert tree.densest(1, 1) == []


def test_removing_what_was_not_added_is_an_error() -> None:
    with pytest.raises(KeyError):
        _tree([(5, 1)]).remove(900, 57)


@pytest.mark.parametrize(("most", "levels"), [(1, 1), (15, 1), (16, 2), (63, 2), (64, 3), (131072, 8)])
def test_the_widest_range_holds_the_longest_length(most: int, levels: int) -> None:
    tree = _tree([(most, 1)], most)
    assert tree.levels == levels
    assert tree.densest(10**9, 10**9)[0].high > most


def test_the_narrower_of_two_equally_dense_ranges_wins() -> None:
    # Four requests, one in each of the four narrowest ranges of one wider: all five are equally dense.
    found = _tree([(0, 1), (16, 1), (32, 1), (48, 1)]).densest(1, 10**9)
    assert found == [LengthRange(low, low + 16, 1, 1) for low in (0, 16, 32, 48)]


def test_a_dense_range_that_does_not_fill_a_batch_is_not_taken() -> None:
    lengths = [(5, 1)] * 7 + [(1024 + 16 * i, 1) for i in range(16)]
    assert _tree(lengths).densest(8, 10**9) == [LengthRange(1024, 1280, 16, 16)]
    assert _tree(lengths).densest(7, 10**9) == [LengthRange(0, 16, 7, 7)]
