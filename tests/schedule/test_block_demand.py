"""The look-ahead against playing every step: no fewer blocks than will be needed, and no more."""

from __future__ import annotations

import random

import pytest

from kvcompile.schedule.block_demand import BlockDemand, Holding


def _played(holdings: list[Holding], horizon: int, block_tokens: int, release_steps: int) -> int:
    """Blocks needed beyond those in use now at the worst step, by playing each of them."""
    worst = 0
    for step in range(horizon + 1):
        needed = 0
        for holding in holdings:
            if holding.returned is not None and step >= holding.left + release_steps:
                needed -= holding.returned
                continue
            tokens = holding.tokens + min(step, holding.left)
            needed += max(holding.blocks, -(-tokens // block_tokens)) - holding.blocks + holding.missing
            needed -= holding.pruned if step >= release_steps else 0
        worst = max(worst, needed)
    return worst


def _holding(rng: random.Random, block_tokens: int) -> Holding:
    tokens = rng.randrange(1, 400)
    blocks = -(-tokens // block_tokens)
    missing = rng.choice([0, 0, rng.randrange(blocks + 1)])
    left, returned = rng.choice([0, 1, 5, 40, 1000]), rng.randrange(blocks - missing + 1)
    pruned = rng.choice([0, rng.randrange(missing + returned + 1)])
    return Holding(tokens, blocks, missing, left, rng.choice([returned, returned, None]), pruned)


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_is_that_of_playing_every_step(seed: int) -> None:
    rng = random.Random(seed)
    for horizon, block_tokens, release_steps in [(1, 16, 1), (32, 16, 1), (32, 16, 2), (100, 8, 2), (7, 128, 1)]:
        holdings = [_holding(rng, block_tokens) for _ in range(rng.randrange(1, 30))]
        demand = BlockDemand(horizon, block_tokens, release_steps)
        for count, holding in enumerate(holdings):
            asked = demand.peak_with(holding)
            demand.add(holding)
            assert demand.peak() == asked == _played(holdings[: count + 1], horizon, block_tokens, release_steps)


@pytest.mark.parametrize("horizon", [1, 15, 16, 17, 32, 100])
def test_those_that_go_on_beyond_the_horizon_can_be_counted_by_the_fill_of_their_last_block(horizon: int) -> None:
    rng = random.Random(horizon)
    lengths = [rng.randrange(1, 500) for _ in range(40)]
    fill = [sum(tokens % 16 == part for tokens in lengths) for part in range(16)]
    together, singly = BlockDemand(horizon, 16, 1), BlockDemand(horizon, 16, 1)
    together.add_lasting(fill)
    for tokens in lengths:
        singly.add(Holding(tokens, -(-tokens // 16), missing=0, left=10**6, returned=0))
    assert together._change == singly._change


def test_nobody_needs_nothing() -> None:
    assert BlockDemand(32, 16, 1).peak() == 0


def test_a_request_at_the_end_of_a_block_needs_one_at_the_next_token_and_one_every_sixteen_after() -> None:
    for horizon, needed in [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]:
        demand = BlockDemand(horizon, 16, 1)
        demand.add(Holding(tokens=64, blocks=4, missing=0, left=1000, returned=0))
        assert demand.peak() == needed


def test_nothing_is_needed_after_the_last_token() -> None:
    demand = BlockDemand(1000, 16, 1)
    demand.add(Holding(tokens=64, blocks=4, missing=0, left=16, returned=0))
    assert demand.peak() == 1


def test_what_one_gives_back_another_may_take_but_not_before() -> None:
    ends = Holding(tokens=160, blocks=10, missing=0, left=3, returned=10)
    grows = Holding(tokens=64, blocks=4, missing=0, left=1000, returned=0)
    demand = BlockDemand(100, 16, 2)
    demand.add(ends)
    demand.add(grows)
    # The one takes its 11th block at once and gives all back at step 5; the other takes one at step 1.
    assert demand.peak() == 2


def test_a_prompt_in_progress_gives_nothing_back_however_few_tokens_it_may_add() -> None:
    grows = Holding(tokens=64, blocks=4, missing=0, left=1000, returned=0)
    needed = []
    for returned in (10, None):
        demand = BlockDemand(32, 16, 1)
        demand.add(grows)
        demand.add(Holding(tokens=160, blocks=10, missing=4, left=1, returned=returned))
        needed.append(demand.peak())
    # At once what is missing of the prompt, and a block for its token and the other's; later the other's next.
    assert needed == [6, 7]
