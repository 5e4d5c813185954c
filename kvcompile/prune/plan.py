"""How much of a prompt is kept, and what that releases.

    B = budget_tokens, or max(ceil(keep_ratio * T), min_tokens); never below sink + window + block_size
    f = (T - B) // block_size          pages that are released: the first columns of the request's block table
    K = T - f * block_size             tokens that are kept in the other pages, B <= K < B + block_size

A request may bring its own budget (`kv_budget_tokens`) or none (`kv_prune: false`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcompile.config import PruneConfig, UsageError

BUDGET, SWITCH = "kv_budget_tokens", "kv_prune"  # of a request's vllm_xargs


@dataclass(frozen=True)
class Plan:
    """Of one request in one life: tokens: T; released: f, above 0; epoch: how often it had been preempted before.

    inline: the released pages were never there: kept tokens alone are stored, while the prompt is computed.
    """

    tokens: int
    released: int
    block_size: int
    epoch: int
    inline: bool = False

    @property
    def kept(self) -> int:
        return self.tokens - self.released * self.block_size

    @property
    def first(self) -> int:
        """The position where the kept tokens begin."""
        return self.released * self.block_size


def least_budget(config: PruneConfig, block_size: int) -> int:
    """Fewest tokens that may be kept."""
    return config.sink_tokens + config.window_tokens + block_size


def request_budget(extra: Mapping[str, Any] | None, config: PruneConfig, block_size: int) -> int | None:
    """The budget that a request asks for in tokens; None if it asks for none of its own; 0: it is not pruned.

    Raises UsageError for what is not allowed: a request is refused rather than served otherwise than asked.
    """
    extra = extra or {}
    if (switch := extra.get(SWITCH, True)) not in (True, False, "true", "false", 1, 0):
        raise UsageError(f"{SWITCH} is {switch!r}; allowed are true and false")
    if switch in (False, "false", 0):
        return 0
    budget = extra.get(BUDGET)
    if budget is None:
        return None
    least = least_budget(config, block_size)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < least:
        raise UsageError(
            f"{BUDGET} is {budget!r}; allowed are whole numbers of at least {least}, which are prune.sink_tokens, "
            f"prune.window_tokens and a block; or {SWITCH}: false"
        )
    return budget


def plan(tokens: int, block_size: int, config: PruneConfig, epoch: int, own_budget: int | None = None) -> Plan | None:
    """The plan for a prompt of so many tokens; None if nothing is released.

    own_budget: what `request_budget` made of the request. tokens: generated ones too, for a request that comes back.
    """
    if own_budget == 0:
        return None
    budget = own_budget or config.budget_tokens or max(math.ceil(config.keep_ratio * tokens), config.min_tokens)
    released = (tokens - max(budget, least_budget(config, block_size))) // block_size
    return Plan(tokens, released, block_size, epoch) if released > 0 else None
