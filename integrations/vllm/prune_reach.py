"""Which prompts a server's own options reach: whether any is long enough to be pruned, and short enough for inline."""

from __future__ import annotations

from vllm.config import SchedulerConfig, VllmConfig

from kvcompile.config import PruneConfig
from kvcompile.prune.plan import BUDGET, shortest_pruned


def step_tokens(scheduler: SchedulerConfig) -> int:
    """Most tokens that a step computes of one prompt."""
    most = scheduler.max_num_scheduled_tokens
    if most is None:
        most = scheduler.max_num_batched_tokens
    return min(most, scheduler.long_prefill_token_threshold or most)


def _shortest(config: VllmConfig, options: PruneConfig) -> int | None:
    return shortest_pruned(options, config.cache_config.block_size, config.model_config.max_model_len)


def never_inline(config: VllmConfig, options: PruneConfig) -> str | None:
    """Why `prune.inline=always` does nothing; None if it is not set, or stores prompts inline."""
    shortest, step = _shortest(config, options), step_tokens(config.scheduler_config)
    if options.inline != "always" or shortest is None or shortest <= step:
        return None
    return (
        f"prune.inline=always stores no prompt inline: the shortest that is pruned has {shortest} tokens, and a step "
        f"computes {step}"
    )


def said(config: VllmConfig, options: PruneConfig) -> list[str]:
    """What of it belongs into the start-up line."""
    longest, step = config.model_config.max_model_len, step_tokens(config.scheduler_config)
    if _shortest(config, options) is None:
        return [f"which no prompt of up to {longest} tokens is long enough for, unless it brings its own {BUDGET}"]
    if why := never_inline(config, options):
        return [why]
    return [f"inline up to {step} tokens"] if options.inline == "always" and step < longest else []
