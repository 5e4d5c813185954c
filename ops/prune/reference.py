"""Pruning in float64 and plain loops: slow, obviously right, the oracle of the tests.

Every function takes one layer of one request: query [W, H, d], keys and values [T, G, d], float64.

attention    A[h][i][t] = exp(scale q_i . k_t) / sum over u <= T - W + i of exp(scale q_i . k_u), 0 for later t
pooled       A'[h][i][t] = max of A[h][i][u] over |u - t| <= kernel // 2
anchor       Y[h][i] = sum over evictable t of A'[h][i][t] V[t]
score        s[g][t] = sum over the heads h of g, over i, of A'[h][i][t] <Y[h][i], V[t]>
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvcompile.ops.kv8.reference import dequantise
from kvcompile.ops.prune.methods import Method


def keys_and_values(
    kv_cache: torch.Tensor, block_table_row: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [T, G, d] each, position by position."""
    block_size = kv_cache.shape[2]
    pairs = [dequantise(kv_cache[int(block_table_row[t // block_size]), :, t % block_size]) for t in range(length)]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def attention(query: torch.Tensor, keys: torch.Tensor, scale: float) -> list[list[list[float]]]:
    """A[h][i][t] over the full causal row, for every query head."""
    window, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    group = heads // kv_heads
    rows = []
    for h in range(heads):
        of_head = []
        for i in range(window):
            seen = length - window + i + 1
            logits = [float(query[i, h] @ keys[t, h // group]) * scale for t in range(seen)]
            peak = max(logits)
            weights = [math.exp(x - peak) for x in logits]
            total = sum(weights)
            of_head.append([x / total for x in weights] + [0.0] * (length - seen))
        rows.append(of_head)
    return rows


def pooled(row: list[float], kernel: int) -> list[float]:
    """Maximum over kernel // 2 neighbours on either side; a row has none beyond its ends."""
    reach = kernel // 2
    return [max(row[max(0, t - reach) : t + reach + 1]) for t in range(len(row))]


def anchor_projection(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sink: int, kernel: int
) -> tuple[list[list[float]], float]:
    """AnDPro's s[g][t], 0 for tokens that are always kept, and the sum of |Y|^2 over all heads and queries."""
    (window, heads, _), (length, kv_heads, _) = query.shape, keys.shape
    group = heads // kv_heads
    scores = [[0.0] * length for _ in range(kv_heads)]
    norms = 0.0
    for h, of_head in enumerate(attention(query, keys, scale)):
        for row in of_head:
            weights = pooled(row, kernel)
            anchor = torch.zeros(keys.shape[2], dtype=torch.float64)
            for t in range(sink, length - window):
                anchor += weights[t] * values[t, h // group]
            norms += float(anchor @ anchor)
            for t in range(sink, length - window):
                scores[h // group][t] += weights[t] * float(anchor @ values[t, h // group])
    return scores, norms


def window_attention(query: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int) -> list[list[float]]:
    """SnapKV's s[g][t] of t < T - W: mean over the window, pooled, averaged over the heads of g."""
    (window, heads, _), (length, kv_heads, _) = query.shape, keys.shape
    group = heads // kv_heads
    scores = [[0.0] * (length - window) for _ in range(kv_heads)]
    for h, of_head in enumerate(attention(query, keys, scale)):
        means = [sum(row[t] for row in of_head) / window for t in range(length - window)]
        for t, weight in enumerate(pooled(means, kernel)):
            scores[h // group][t] += weight / group
    return scores


def last_query_attention(query: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int = 1) -> list[float]:
    """TOVA's s[t]: A of the last query, averaged over all heads; each head's pooled with a `kernel`."""
    rows = [pooled(of_head[0], kernel) for of_head in attention(query[-1:], keys, scale)]
    return [sum(row[t] for row in rows) / len(rows) for t in range(keys.shape[0])]


def key_difference(keys: torch.Tensor) -> list[list[float]]:
    """KeyDiff's s[g][t]: - cos of the key and the mean of all keys of its head, each scaled to norm 1."""
    length, kv_heads, d = keys.shape
    scores = []
    for g in range(kv_heads):
        units = [keys[t, g] / max(float(keys[t, g].norm()), 1e-12) for t in range(length)]
        mean = sum(units, torch.zeros(d, dtype=torch.float64))
        mean = mean / max(float(mean.norm()), 1e-12)
        scores.append([-float(unit @ mean) for unit in units])
    return scores


def projected_norm(values: torch.Tensor, output_weight: torch.Tensor, heads: int) -> list[list[float]]:
    """CriticalKV's n[g][t]: L1 norm of V[t] through each head's columns of the projection, averaged over the heads."""
    length, kv_heads, d = values.shape
    group = heads // kv_heads
    norms = [[0.0] * length for _ in range(kv_heads)]
    for h in range(heads):
        for t in range(length):
            projected = output_weight[:, h * d : (h + 1) * d].double() @ values[t, h // group]
            norms[h // group][t] += float(projected.abs().sum()) / group
    return norms


def random_bits(seed: int, length: int) -> list[int]:
    """24 bits for each position, in integers of Python."""

    def mix(x: int) -> int:
        for _ in range(2):
            x = ((x ^ x >> 16) * 0x45D9F3B) % 2**32
        return x ^ x >> 16

    start = mix((mix(seed) + length) % 2**32)
    return [mix((start + t) % 2**32) >> 8 for t in range(length)]


def score(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    method: Method,
    output_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [stages, G, T] as `op.prune_score`."""
    length, kv_heads, _ = keys.shape
    evictable = range(method.sink, length - method.window)
    scores = torch.zeros(len(method.stages), kv_heads, length, dtype=torch.float64)

    def fill(stage: int, of_token: Callable[[int, int], float]) -> None:
        for g in range(kv_heads):
            for t in evictable:
                scores[stage, g, t] = of_token(g, t)

    if method.NAME in ("andpro", "blend", "robust"):
        s, _ = anchor_projection(query, keys, values, scale, method.sink, method.kernel)
        fill(0, lambda g, t: s[g][t])
    if method.NAME in ("tova", "blend"):
        last = last_query_attention(query, keys, scale)
        fill(len(method.stages) - 1, lambda g, t: last[t])
    if method.NAME == "robust":
        pooled_last = last_query_attention(query, keys, scale, method.kernel)
        fill(1, lambda g, t: pooled_last[t])
    if method.NAME in ("keydiff", "robust"):
        unlike = key_difference(keys)
        means = [sum(of_head[t] for of_head in unlike) / kv_heads for t in range(length)]
        fill(len(method.stages) - 1, lambda g, t: unlike[g][t] if method.NAME == "keydiff" else means[t])
    if method.NAME in ("snapkv", "critical"):
        a = window_attention(query, keys, scale, method.kernel)
        fill(0, lambda g, t: a[g][t])
    if method.NAME == "critical":
        n = projected_norm(values, output_weight, query.shape[1])
        fill(1, lambda g, t: (a[g][t] + method.epsilon) * n[g][t])
    if method.NAME == "streaming":
        fill(0, lambda g, t: t)
    if method.NAME == "random":
        bits = random_bits(method.seed, length)
        fill(0, lambda g, t: bits[t] / 2**24)
    return scores


def select(scores: torch.Tensor, method: Method, keep: int) -> list[list[int]]:
    """The kept positions of each head, ascending: lists and sorts, chunk by chunk."""
    _, kv_heads, length = scores.shape
    budget = keep - method.sink - method.window
    kept = []
    for g in range(kv_heads):
        taken: list[int] = []
        for number, stage in enumerate(method.stages):
            s = scores[number, g].tolist()
            chunks = []
            for begin in range(method.sink, length - method.window, stage.chunk):
                end = min(begin + stage.chunk, length - method.window)
                tokens = [t for t in range(begin, end) if t not in taken]
                if tokens:
                    value = sum(s[t] for t in tokens) if stage.reduce == "sum" else max(s[t] for t in tokens)
                    chunks.append((value, begin, tokens))
            last = number == len(method.stages) - 1
            room = budget - len(taken) if last else int(stage.share * budget)
            for _, _, tokens in sorted(chunks, reverse=True):
                if len(tokens) > room:
                    if last:
                        taken += sorted(tokens, key=lambda t: (s[t], t), reverse=True)[:room]
                    break
                taken += tokens
                room -= len(tokens)
        kept.append(sorted([*range(method.sink), *taken, *range(length - method.window, length)]))
    return kept
