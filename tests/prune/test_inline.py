"""Which prompts are stored inline, and for how long one waits for it."""

from __future__ import annotations

import pytest

from kvcompile.prune.inline import INLINE, TWO_PHASE, InlinePolicy
from kvcompile.prune.plan import Plan

PLAN = Plan(tokens=500, released=20, block_size=16, epoch=0)


def policy(mode: str, *, caching: bool = True, step_tokens: int = 500) -> InlinePolicy:
    return InlinePolicy(mode, caching, step_tokens, most_held=2)


@pytest.mark.parametrize(
    ("mode", "caching", "ways"),
    [
        ("never", True, (TWO_PHASE,)),
        ("never", False, (TWO_PHASE,)),
        ("auto", True, (TWO_PHASE, INLINE)),
        ("auto", False, (INLINE,)),
        ("always", True, (INLINE,)),
        ("always", False, (INLINE,)),
    ],
)
def test_a_whole_prompt_is_stored_as_the_mode_says(mode: str, caching: bool, ways: tuple[bool, ...]) -> None:
    assert policy(mode, caching=caching).ways("x", PLAN, 500, hits=0) == ways


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_a_prompt_that_is_longer_than_a_step_or_was_found_in_part_is_stored_in_two_phases(mode: str) -> None:
    assert policy(mode, step_tokens=499).ways("x", PLAN, 499, hits=0) == (TWO_PHASE,)
    assert policy(mode).ways("x", PLAN, 180, hits=320) == (TWO_PHASE,)


def test_with_always_a_prompt_that_would_be_split_waits_for_so_many_steps_in_each_life() -> None:
    always = policy("always")
    assert [always.ways("x", PLAN, 499, hits=0) for _ in range(4)] == [(), (), (TWO_PHASE,), (TWO_PHASE,)]
    assert always.ways("y", PLAN, 1, hits=0) == ()
    always.forget("x")
    assert always.ways("x", PLAN, 499, hits=0) == ()


def test_with_auto_it_does_not_wait_where_it_fits() -> None:
    for caching in (True, False):
        assert policy("auto", caching=caching).ways("x", PLAN, 499, hits=0) == (TWO_PHASE,)


def test_only_always_passes_hits_over_and_only_of_prompts_that_can_be_stored_inline() -> None:
    assert not policy("always").uses_hits(PLAN)
    assert policy("always", step_tokens=499).uses_hits(PLAN)
    assert policy("auto").uses_hits(PLAN) and policy("never").uses_hits(PLAN)
