"""Prompts of pruning's tests on the GPU, and their scores there."""

from __future__ import annotations

import torch

from kvcompile.ops.prune import Method, prune_score
from tests.ops.prune.prompts import Prompt


def on_gpu(prompt: Prompt) -> Prompt:
    return Prompt(prompt.query.cuda(), prompt.cache.cuda(), prompt.row.cuda(), prompt.length)


def score_on_gpu(prompt: Prompt, method: Method) -> torch.Tensor:
    """The scores of the GPU, on the CPU."""
    p, weight = on_gpu(prompt), prompt.output_weight.to("cuda", prompt.query.dtype)
    return prune_score(p.query, p.cache, p.row, p.length, p.scale, method, weight).cpu()
