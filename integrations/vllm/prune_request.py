"""What a request may say of its own pruning, in `vllm_xargs`: kv_budget_tokens, and kv_prune: false."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm.active import is_active, prunes
from kvcompile.presets import NAME
from kvcompile.prune.plan import BUDGET, SWITCH, request_budget


def refuse_wrong(config: VllmConfig, params: Any) -> None:
    """Raise vLLM's ValueError of a wrong request for what is not allowed or cannot be had on this server.

    Of any other kind vLLM's server, which answers 400 to both, writes a trace into the log each time.
    """
    extra = getattr(params, "extra_args", None)
    if not extra or not is_active(config):
        return
    options = PruneConfig(**config.additional_config[NAME]["prune"])
    try:
        budget = request_budget(extra, options, config.cache_config.block_size)
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None
    asked = BUDGET if budget else SWITCH if SWITCH in extra and budget is None else None
    if asked and not prunes(config):
        raise VLLMValidationError(f"{asked} is {extra[asked]!r} and this server does not prune; leave it out")
    if asked and params.prompt_logprobs is not None:
        raise VLLMValidationError(
            f"{asked} is {extra[asked]!r} and prompt_logprobs are asked for, with which nothing is pruned"
        )
