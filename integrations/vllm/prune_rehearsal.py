"""A made-up prompt is pruned before there is a request: none waits for kernels to be compiled, and what those do not
take ends the start with a reason, where each prompt by itself would only stay whole."""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm.prune_jobs import Choose, Move, Score
from kvcompile.ops.prune import pages_of, prune_copy
from kvcompile.presets import NAME
from kvcompile.prune.plan import Plan


@torch.inference_mode()
def rehearse(runner: Any, score: Score, choose: Choose, move: Move) -> None:
    """Of the shapes of one layer of a runner, in both ways: stored inline, and moved afterwards.

    Raises what an operator raises.
    """
    config, model = PruneConfig(**runner.vllm_config.additional_config[NAME]["prune"]), runner.model_config
    block_size, layer = runner.cache_config.block_size, next(iter(runner.compilation_config.static_forward_context))
    plan = Plan(config.least_budget(block_size) + block_size, released=1, block_size=block_size)
    heads = model.get_num_attention_heads(runner.parallel_config), model.get_num_kv_heads(runner.parallel_config)
    query, key = (
        torch.ones(plan.tokens, count, model.get_head_size(), dtype=model.dtype, device=runner.device)
        for count in heads
    )
    cache, row = pages_of(key, key, block_size)
    scale = model.get_head_size() ** -0.5
    (keep,) = choose([score(layer, query[-config.window_tokens :], cache, row, plan.tokens, scale)], plan.kept)
    prune_copy(cache, row, torch.zeros_like(cache), row, keep, plan.first)
    move([(cache, row, keep)], plan)
