"""From scores to the tokens that are kept: plain torch on any device, without waiting for it."""

from __future__ import annotations

import torch

from kvcompile.ops.prune import checks
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
    checks.check_select(scores, method, keep)
    _, kv_heads, length = scores.shape
    evictable = slice(method.sink, length - method.window)
    kept = torch.ones((kv_heads, length), dtype=torch.bool, device=scores.device)
    budget = keep - method.always_kept
    *whole, last = zip(method.stages, scores[..., evictable], strict=True)
    taken = torch.zeros_like(kept[:, evictable])
    for stage, stage_scores in whole:
        start, end, _ = _places(stage_scores, stage, taken)
        taken |= (end <= int(stage.share * budget)) & (start < end)
    left = budget - taken.sum(1, keepdim=True)
    _, _, rank = _places(last[1], last[0], taken)
    taken |= rank < left
    kept[:, evictable] = taken

    # Places of the kept ones without `nonzero`, whose shape would wait for a GPU.
    place = torch.where(kept, kept.cumsum(1) - 1, keep)
    result = torch.empty((kv_heads, keep + 1), dtype=torch.int32, device=scores.device)
    token = torch.arange(length, dtype=torch.int32, device=scores.device).expand(kv_heads, -1)
    return result.scatter_(1, place, token)[:, :keep].contiguous()


def _places(scores: torch.Tensor, stage: Stage, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per token of [G, n]: tokens not taken in better chunks, the same with its own chunk, tokens ranked before it."""
    kv_heads, n = scores.shape
    chunks = -(-n // stage.chunk)
    free = torch.zeros((kv_heads, chunks * stage.chunk), dtype=torch.bool, device=scores.device)
    free[:, :n] = ~taken
    padded = torch.zeros_like(free, dtype=torch.float32)
    padded[:, :n] = scores
    if stage.reduce == "sum":
        value = padded.where(free, 0.0).unflatten(1, (chunks, stage.chunk)).sum(-1)
    else:
        value = padded.where(free, float("-inf")).unflatten(1, (chunks, stage.chunk)).amax(-1)
    size = free.unflatten(1, (chunks, stage.chunk)).sum(-1)
    order = _descending(value)
    end = torch.empty_like(size).scatter_(1, order, size.gather(1, order).cumsum(1))
    start, end = (x.repeat_interleave(stage.chunk, 1)[:, :n] for x in (end - size, end))
    # By score, then (stably) by chunk; what is taken comes last.
    order = _descending(scores)
    order = order.gather(1, start.masked_fill(taken, n).gather(1, order).argsort(dim=1, stable=True))
    return start, end, _inverse(order)


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Indices that sort each row from high to low, equal ones from late to early."""
    return x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True).indices


def _inverse(order: torch.Tensor) -> torch.Tensor:
    rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, rank)
