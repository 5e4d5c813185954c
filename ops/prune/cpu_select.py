"""`prune_select` in plain torch: the implementation on a CPU, and what the kernel has to agree with bit for bit."""

from __future__ import annotations

import torch

from kvcompile.ops.prune.methods import Stage


def select(scores: torch.Tensor, keep: int, sink: int, window: int, stages: list[Stage]) -> torch.Tensor:
    """int32 [G, keep] as `selection.select`, whose checks the arguments have passed."""
    _, kv_heads, length = scores.shape
    evictable = slice(sink, length - window)
    kept = torch.ones((kv_heads, length), dtype=torch.bool, device=scores.device)
    budget = keep - sink - window
    *whole, last = zip(stages, scores[..., evictable], strict=True)
    taken = torch.zeros_like(kept[:, evictable])
    for stage, stage_scores in whole:
        start, end, _ = _places(stage_scores, stage, taken)
        taken |= (end <= int(stage.share * budget)) & (start < end)
    left = budget - taken.sum(1, keepdim=True)
    _, _, rank = _places(last[1], last[0], taken)
    taken |= rank < left
    kept[:, evictable] = taken

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
        value = _sum(padded.where(free, 0.0).unflatten(1, (chunks, stage.chunk)))
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


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, first to last: the order of torch's own sum differs between devices and processors."""
    total = x[..., 0].clone()
    for i in range(1, x.shape[-1]):
        total += x[..., i]
    return total


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Indices that sort each row from high to low, equal ones from late to early."""
    return x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True).indices


def _inverse(order: torch.Tensor) -> torch.Tensor:
    rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, rank)
