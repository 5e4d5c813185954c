"""From scores to the tokens that are kept: the operators `prune_select` and `prune_select_layers`, their Python names.

On a CPU in plain torch (cpu_select.py), on CUDA one kernel (select.cu); both choose the very same tokens. A layer by
itself leaves most of a GPU idle: layers that can wait for each other are selected together.
"""

from __future__ import annotations

import torch

from kvcompile.ops.library import register
from kvcompile.ops.prune import checks, cpu_select, cuda_select
from kvcompile.ops.prune.methods import Method, Stage


def select(scores: torch.Tensor, method: Method, keep: int) -> torch.Tensor:
    """int32 [G, keep]: the positions each KV head keeps, ascending, none twice, exactly `keep` for every head.

    scores: fp32 [stages, G, T] as `prune_score` returns them for this method. Those of the first `method.sink` and the
        last `method.window` tokens are not looked at: these are kept.
    keep: tokens, from sink + window to T. keep = T gives 0 to T - 1 whatever the scores; a prompt of T <= budget tokens
        is not to be pruned, and its caller calls neither this nor `prune_compact`.

    Evictable tokens form chunks of `stage.chunk` from `sink` on; the last may be shorter. A chunk scores the sum or the
    maximum of its tokens' scores. Chunks are taken from the best down: a stage that is not the last takes whole chunks
    until the next would exceed floor(share * (keep - sink - window)) tokens; the last takes what none before it took,
    until exactly `keep` tokens are kept, and of its last chunk the best tokens. Ties, between chunks and between tokens
    of that last chunk, go to the later position: all scores equal keep the most recent. NaN ranks above everything.

    Raises ValueError naming the argument that does not fit.
    """
    checks.check_stages(scores, method)
    return torch.ops.kvcompile.prune_select(scores, keep, *_parameters(method))


def select_layers(scores: list[torch.Tensor], method: Method, keep: int) -> list[torch.Tensor]:
    """int32 [G, keep] of each layer: as `select` of each, in launches of up to 16 layers on a GPU.

    scores: on one device. Raises ValueError naming the argument that does not fit.
    """
    for of_layer in scores:
        checks.check_stages(of_layer, method)
    return torch.ops.kvcompile.prune_select_layers(scores, keep, *_parameters(method)) if scores else []


def _parameters(method: Method) -> tuple[int, int, list[float], list[int], list[str]]:
    """Those of both operators, from `sink` on."""
    stages = method.stages
    return (
        method.sink,
        method.window,
        [float(stage.share) for stage in stages],
        [stage.chunk for stage in stages],
        [stage.reduce for stage in stages],
    )


def _stages(shares: list[float], chunks: list[int], reduces: list[str]) -> list[Stage]:
    return [Stage(*parts) for parts in zip(shares, chunks, reduces, strict=True)]


def _select(
    scores: torch.Tensor,
    keep: int,
    sink: int,
    window: int,
    shares: list[float],
    chunks: list[int],
    reduces: list[str],
) -> torch.Tensor:
    checks.check_select(scores, keep, sink, window, shares, chunks, reduces)
    chosen = (cuda_select if scores.is_cuda else cpu_select).select
    return chosen(scores, keep, sink, window, _stages(shares, chunks, reduces))


def _select_fake(
    scores: torch.Tensor,
    keep: int,
    sink: int,
    window: int,
    shares: list[float],
    chunks: list[int],
    reduces: list[str],
) -> torch.Tensor:
    return scores.new_empty((scores.shape[1], keep), dtype=torch.int32)


def _select_layers(
    scores: list[torch.Tensor],
    keep: int,
    sink: int,
    window: int,
    shares: list[float],
    chunks: list[int],
    reduces: list[str],
) -> list[torch.Tensor]:
    for of_layer in scores:
        checks.check_select(of_layer, keep, sink, window, shares, chunks, reduces)
    stages = _stages(shares, chunks, reduces)
    if scores[0].is_cuda:
        return cuda_select.select_layers(scores, keep, sink, window, stages)
    return [cpu_select.select(of_layer, keep, sink, window, stages) for of_layer in scores]


def _select_layers_fake(
    scores: list[torch.Tensor],
    keep: int,
    sink: int,
    window: int,
    shares: list[float],
    chunks: list[int],
    reduces: list[str],
) -> list[torch.Tensor]:
    return [_select_fake(of_layer, keep, sink, window, shares, chunks, reduces) for of_layer in scores]


register(
    "prune_select_layers(Tensor[] scores, SymInt keep, int sink, int window, float[] shares, int[] chunks, "
    "str[] reduces) -> Tensor[]",
    fake=_select_layers_fake,
    CPU=_select_layers,
    CUDA=_select_layers,
)
register(
    "prune_select(Tensor scores, SymInt keep, int sink, int window, float[] shares, int[] chunks, str[] reduces) "
    "-> Tensor",
    fake=_select_fake,
    CPU=_select,
    CUDA=_select,
)
