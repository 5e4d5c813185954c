"""`prune_score` on a CPU: fp32, tile by tile over the request's positions, so that memory does not grow with them.

First pass, over all positions: softmax statistics of the observation queries and, where the method has one, the anchor
Y, both running and rescaled to the largest logit so far, as in flash attention. Second pass, over evictable positions:
A again from the statistics, then the scores. Dividing by the sum keeps the order, so weights are pooled before it. A
tile reads `reach` = kernel // 2 positions more on either side, for the pooling. Nothing is larger than [H * W, tile +
2 * reach], a tile of keys or values, for `critical` [tile, hidden], and for what pools means of the window [H, T].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcompile.ops.prune import pages, positions
from kvcompile.ops.prune.methods import stages_of

# Elements of the weights [H * W, tile] of a tile: 1 MiB of fp32, for a core's second-level cache.
TILE_ELEMENTS = 256 << 10
MAX_TILE_TOKENS = 1024  # bounds [tile, hidden] of `critical`


def score(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: str,
    sink: int,
    kernel: int,
    epsilon: float,
    seed: int,
    output_weight: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 [stages, G, T] as `op.prune_score`, whose checks the arguments have passed; 0 where nothing is evictable."""
    window = query.shape[0]
    evictable = range(sink, max(sink, length - window))
    scores = query.new_zeros((stages_of(method), kv_cache.shape[3], length), dtype=torch.float32)
    if not evictable:
        return scores
    span = slice(evictable.start, evictable.stop)
    if method == "streaming":
        scores[0, :, span] = positions.recency(length, query.device)[span]
        return scores
    if method == "random":
        scores[0, :, span] = positions.uniform(seed, length, query.device)[span]
        return scores

    rows = _Observation(query[-1:] if method == "tova" else query, kv_cache, block_table_row, length, scale)
    if method in ("andpro", "blend", "robust"):
        _anchored(rows, scores, evictable, kernel, pool_last=method == "robust")
        if method == "robust":
            scores[2, :, span] = _key_difference(rows, evictable).mean(0)
    elif method == "keydiff":
        scores[0, :, span] = _key_difference(rows, evictable)
    elif method == "tova":
        rows.measure(evictable)
        for begin, end in rows.tiles(evictable):
            scores[0, :, begin:end] = rows.per_head(rows.weights(begin, end)).mean((0, 1, 2))
    elif method in ("snapkv", "critical"):
        scores[0, :, span] = _window_attention(rows, evictable, kernel)
        if method == "critical":
            for begin, end in rows.tiles(evictable):
                values = pages.read(kv_cache, block_table_row, pages.VALUES, begin, end)
                norm = _projected_norm(values, output_weight, query.shape[1])
                scores[1, :, begin:end] = (scores[0, :, begin:end] + epsilon) * norm
    else:
        raise ValueError(f"prune_score: method: given {method!r}, of which there are no scores on {query.device}")
    return scores


def _anchored(rows: _Observation, scores: torch.Tensor, evictable: range, kernel: int, pool_last: bool) -> None:
    """AnDPro's scores into `scores[0]`; into `scores[1]`, where there is one, the last query's mean attention.

    That is of pooled weights with `pool_last`.
    """
    reach = kernel // 2
    anchor = rows.measure(evictable, reach)
    for begin, end in rows.tiles(evictable):
        weights = rows.weights(begin, end, reach)
        values = pages.read(rows.cache, rows.row, pages.VALUES, begin, end)
        projected = torch.bmm(anchor, values.transpose(1, 2))
        pooled = max_pool(weights, kernel)
        scores[0, :, begin:end] = projected.mul_(pooled).sum(1)
        if scores.shape[0] > 1:
            seen = pooled if pool_last else weights[..., reach : reach + end - begin]
            scores[1, :, begin:end] = rows.per_head(seen)[:, :, -1].mean((0, 1))


def _key_difference(rows: _Observation, evictable: range) -> torch.Tensor:
    """KeyDiff's scores [G, evictable tokens]."""
    mean = rows.query.new_zeros((rows.kv_heads, 1, rows.query.shape[2]))
    for begin, end in rows.tiles(range(rows.length)):
        keys = pages.read(rows.cache, rows.row, pages.KEYS, begin, end)
        mean += F.normalize(keys, dim=-1).sum(1, keepdim=True)
    mean = F.normalize(mean, dim=-1)
    scores = mean.new_empty((rows.kv_heads, len(evictable)))
    for begin, end in rows.tiles(evictable):
        keys = pages.read(rows.cache, rows.row, pages.KEYS, begin, end)
        alike = (F.normalize(keys, dim=-1) * mean).sum(-1)
        scores[:, begin - evictable.start : end - evictable.start] = -alike
    return scores


def _window_attention(rows: _Observation, evictable: range, kernel: int) -> torch.Tensor:
    """SnapKV's scores [G, evictable tokens].

    Neighbours of a maximum share it, and such ties are exact only if each mean is computed once: so they are pooled
    when all tiles are done, and not tile by tile with neighbours that two tiles round differently.
    """
    rows.measure(evictable)
    means = rows.query.new_zeros((rows.kv_heads, rows.group, evictable.stop + 2 * (kernel // 2)))
    inner = means[..., kernel // 2 :]
    for begin, end in rows.tiles(range(evictable.stop)):
        inner[..., begin:end] = rows.per_head(rows.weights(begin, end)).mean(2)
    return max_pool(means, kernel)[..., evictable.start :].mean(1)


def max_pool(x: torch.Tensor, kernel: int) -> torch.Tensor:
    """[..., n - kernel + 1]: maximum of every `kernel` neighbours, from maxima of 2, 4, ... neighbours."""
    covered = 1
    while covered < kernel:
        step = min(covered, kernel - covered)
        x = torch.maximum(x[..., :-step], x[..., step:])
        covered += step
    return x


class _Observation:
    """The observation queries as G matrices [r * W, d], and their softmax over the request's positions."""

    def __init__(
        self, query: torch.Tensor, kv_cache: torch.Tensor, block_table_row: torch.Tensor, length: int, scale: float
    ) -> None:
        self.cache, self.row, self.length = kv_cache, block_table_row, length
        self.window, heads, d = query.shape
        self.kv_heads = kv_cache.shape[3]
        self.group = heads // self.kv_heads
        split = (query.float() * scale).view(self.window, self.kv_heads, self.group, d)
        self.query = split.permute(1, 2, 0, 3).reshape(self.kv_heads, self.group * self.window, d)
        self.at = torch.arange(length - self.window, length).repeat(self.group)[:, None]
        self.step = min(MAX_TILE_TOKENS, max(1, TILE_ELEMENTS // (heads * self.window)))
        self.peak = self.query.new_full((*self.query.shape[:2], 1), float("-inf"))
        self.total = torch.zeros_like(self.peak)

    def tiles(self, span: range) -> list[tuple[int, int]]:
        return [(begin, min(begin + self.step, span.stop)) for begin in range(span.start, span.stop, self.step)]

    def per_head(self, weights: torch.Tensor) -> torch.Tensor:
        """[G, r, W, n] from [G, r * W, n]."""
        return weights.unflatten(1, (self.group, self.window))

    def measure(self, evictable: range, reach: int | None = None) -> torch.Tensor | None:
        """Set `peak` and `total`, [G, r * W, 1]: largest logit, and sum of exp(logit - peak), of each query.

        With a `reach`, return the anchor Y [G, r * W, d] of weights pooled over `reach` positions to either side.
        """
        anchor = None if reach is None else torch.zeros_like(self.query)
        for begin, end in self.tiles(range(self.length)):
            low, high = max(0, begin - (reach or 0)), min(self.length, end + (reach or 0))
            logits = self._logits(low, high)
            peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
            fade = torch.exp(self.peak - peak)
            weights = logits.sub_(peak).exp_()
            self.total = self.total * fade + weights[..., begin - low : end - low].sum(-1, keepdim=True)
            self.peak = peak
            if anchor is None:
                continue
            anchor *= fade
            first, last = max(begin, evictable.start), min(end, evictable.stop)
            if first < last:
                pooled = max_pool(_padded(weights, low, high, begin - reach, end + reach), 2 * reach + 1)
                values = pages.read(self.cache, self.row, pages.VALUES, first, last)
                anchor.baddbmm_(pooled[..., first - begin : last - begin], values)
        return None if anchor is None else anchor.div_(self.total)

    def weights(self, begin: int, end: int, reach: int = 0) -> torch.Tensor:
        """A [G, r * W, end - begin + 2 * reach] of positions from begin - reach on; zeros before 0 and from T on."""
        low, high = max(0, begin - reach), min(self.length, end + reach)
        weights = self._logits(low, high).sub_(self.peak).exp_().div_(self.total)
        return _padded(weights, low, high, begin - reach, end + reach)

    def _logits(self, low: int, high: int) -> torch.Tensor:
        """[G, r * W, high - low], -inf where a query does not see the position."""
        keys = pages.read(self.cache, self.row, pages.KEYS, low, high)
        logits = torch.bmm(self.query, keys.transpose(1, 2))
        if high > self.length - self.window:
            logits.masked_fill_(torch.arange(low, high) > self.at, float("-inf"))
        return logits


def _padded(weights: torch.Tensor, low: int, high: int, begin: int, end: int) -> torch.Tensor:
    """Weights of [low, high) as those of [begin, end), with zeros: no maximum of weights is below zero."""
    return weights if (low, high) == (begin, end) else F.pad(weights, (low - begin, end - high))


def _projected_norm(values: torch.Tensor, output_weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[G, n] of values [G, n, d]: L1 norm after the head's part of the projection, averaged over the r heads."""
    kv_heads, n, d = values.shape
    norm = values.new_zeros(kv_heads, n)
    for head, part in enumerate(output_weight.split(d, 1)):
        group = head // (heads // kv_heads)
        norm[group] += (values[group] @ part.float().t()).abs_().sum(-1)
    return norm.div_(heads // kv_heads)
