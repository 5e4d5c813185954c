"""How many blocks the running requests will take from the pool in the steps to come, at most.

What is certain counts: a request produces at most one token a step, and gives its blocks back once it has reached its
limit. That it may stop earlier is not counted on, so demand is never underestimated, but for one thing: whoever counts
blocks as `pruned` trusts a worker to prune. If it refuses, demand was too low by those blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Holding(NamedTuple):
    """What a running request holds and may still ask for.

    tokens: tokens of KV at the end of the present step; of a prompt in progress, all of it. blocks: blocks for them.
    missing: blocks of those that are not allocated yet. left: tokens that it may still add. returned: blocks, of those
    that it has now, that go back to the pool when it ends (a block shared with another request does not); None if
    nobody knows when, as its prompt takes more steps. pruned: blocks, of those missing and returned, that go back as
    soon as this step has computed the prompt.
    """

    tokens: int
    blocks: int
    missing: int
    left: int
    returned: int | None
    pruned: int = 0


class BlockDemand:
    """Blocks needed beyond those in use now, for each step from now (0) to `horizon`.

    release_steps: steps that pass between a request's last token and its blocks being free (with asynchronous
    scheduling one more is scheduled before the last token is known).
    """

    def __init__(self, horizon: int, block_tokens: int, release_steps: int) -> None:
        self.horizon, self.block_tokens, self.release_steps = horizon, block_tokens, release_steps
        self._change = [0] * (horizon + 1)

    def add(self, holding: Holding) -> None:
        """Count a request. O(horizon / block_tokens)."""
        change = self._change
        tokens, blocks, missing, left, returned, pruned = holding
        change[0] += missing
        if self.release_steps <= self.horizon:
            change[self.release_steps] -= pruned
        # The first token for which the blocks are too few comes after `blocks * block_tokens - tokens` more.
        first, last = blocks * self.block_tokens - tokens + 1, min(left, self.horizon)
        crossings = range(first, last + 1, self.block_tokens)
        for step in crossings:
            change[step] += 1
        end = left + self.release_steps
        if returned is not None and end <= self.horizon:
            change[end] -= returned + missing + len(crossings) - pruned

    def add_lasting(self, fill: Sequence[int]) -> None:
        """Count requests of which nothing is missing and that go on for longer than the horizon, all in one go.

        fill: how many have so many tokens in their last block, from 0 (it is full) to block_tokens - 1.
        """
        for tokens, requests in enumerate(fill):
            if requests:
                first = self.block_tokens - tokens + 1 if tokens else 1
                for step in range(first, self.horizon + 1, self.block_tokens):
                    self._change[step] += requests

    def peak(self) -> int:
        """The most that is needed at any step of the horizon; 0 if it is never more than now."""
        return max(0, max(accumulate(self._change)))

    def peak_with(self, holding: Holding) -> int:
        """`peak` if this request were counted too."""
        before = self._change.copy()
        self.add(holding)
        peak = self.peak()
        self._change = before
        return peak
