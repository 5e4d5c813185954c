"""How much of a prompt is kept, and what that releases.

    B = budget_tokens, or max(ceil(keep_ratio * T), min_tokens); at least sink + window + block_size
    f = (T - B) // block_size          pages that are released: the first columns of the request's block table
    K = T - f * block_size             tokens that are kept in the other pages, B <= K < B + block_size

A request may bring its own budget (`kv_budget_tokens`) or none (`kv_prune: false`). A budget below the least, of a
server or of a request, is refused, not raised.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcompile.config import MAX_TOKENS, PruneConfig, UsageError, shown

# Of a request's vllm_xargs: ours, and what begins as ours do and is vLLM's own, of KV connectors.
BUDGET, SWITCH = "kv_budget_tokens", "kv_prune"
_PREFIX, _OF_VLLM = "kv_", "kv_transfer_params"


@dataclass(frozen=True)
class Plan:
    """Of one request in one life: tokens: T; released: f, above 0.

    epoch: which life it is, a number that no other life has: of an id that has ended and come again, as of a request
    that has been preempted. inline: the released pages were never there: kept tokens alone are stored, while the prompt
    is computed.
    """

    tokens: int
    released: int
    block_size: int
    epoch: int = 0
    inline: bool = False

    @property
    def kept(self) -> int:
        return self.tokens - self.released * self.block_size

    @property
    def first(self) -> int:
        """The position where the kept tokens begin."""
        return self.released * self.block_size


def request_budget(extra: Mapping[str, Any] | None, config: PruneConfig, block_size: int) -> int | None:
    """The budget that a request asks for in tokens; None if it asks for none of its own; 0: it is not pruned.

    Raises UsageError for what is not allowed: a request is refused rather than served otherwise than asked.
    """
    extra = extra or {}
    for key in extra:
        if str(key).startswith(_PREFIX) and key not in (BUDGET, SWITCH, _OF_VLLM):
            raise UsageError(
                f"{shown(key)} is unknown; allowed of what begins with {_PREFIX} are {BUDGET} and {SWITCH}; "
                "correct it, or leave it out"
            )
    if (switch := extra.get(SWITCH, True)) not in (True, False, "true", "false", 1, 0):
        raise UsageError(f"{SWITCH} is {shown(switch)}; allowed are true and false")
    budget, least = extra.get(BUDGET), config.least_budget(block_size)
    if budget is not None and not (type(budget) is int and least <= budget <= MAX_TOKENS):
        raise UsageError(
            f"{BUDGET} is {shown(budget)}; allowed are integers of at least {least}, which are prune.sink_tokens, "
            f"prune.window_tokens and a block, and at most {MAX_TOKENS}; or {SWITCH}: false"
        )
    if switch in (True, "true", 1):
        return budget
    if budget is not None:
        raise UsageError(f"{SWITCH} is {shown(switch)} and {BUDGET} is {budget}; give one of the two")
    return 0


def plan(tokens: int, block_size: int, config: PruneConfig, own_budget: int | None = None) -> Plan | None:
    """The plan for a prompt of so many tokens; None if nothing is released.

    own_budget: what `request_budget` made of the request. tokens: generated ones too, for a request that comes back.
    """
    if own_budget == 0:
        return None
    budget = own_budget or config.budget_tokens or max(math.ceil(config.keep_ratio * tokens), config.min_tokens)
    released = (tokens - budget) // block_size
    return Plan(tokens, released, block_size) if released > 0 else None


def shortest_pruned(config: PruneConfig, block_size: int, longest: int) -> int | None:
    """Tokens of the shortest prompt that is pruned, of those up to `longest`; None if none of them is."""
    # What is not kept of a prompt never shrinks as the prompt grows.
    found = bisect_left(range(longest + 1), True, key=lambda tokens: plan(tokens, block_size, config) is not None)
    return found if found <= longest else None
