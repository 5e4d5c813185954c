"""Inputs of norms, and the pass over their graphs."""

from __future__ import annotations

import torch

from kvcompile.passes.norm_quant import NormQuant
from kvcompile.passes.pipeline import PassResult
from tests.passes.graphs import random, trace


def norm_inputs(tokens: int, channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual and weight."""
    x, residual = (random(tokens, channels, dtype=dtype, seed=seed) for seed in (1, 2))
    return x, residual, 1 + random(channels, dtype=dtype, seed=3) / 4


def fused(module: torch.fx.GraphModule) -> PassResult:
    result = NormQuant()(module.graph)
    module.recompile()
    return result


def untouched(function, *inputs) -> PassResult:
    """The result of a pass that must leave the graph of `function` as it is."""
    module = trace(function, *inputs)
    before = str(module.graph)
    result = NormQuant()(module.graph)
    assert str(module.graph) == before
    return result


X, R, W = norm_inputs(5, 64, torch.bfloat16)
