"""`prune_score` on CUDA: launches of the kernels in the .cu files beside, by method.

    andpro, blend      anchor -> anchor_sum -> score (-> finish, for rows of several chunks)
    robust             the same, and keydiff
    snapkv, critical   stats -> means -> finish (and, for critical, a product with the output projection)
    tova               the same over the last query alone
    keydiff            key_sum -> key_difference (-> finish)

Each reads the int8 pages once, in splits over T. Products are in fp16 with fp32 sums: int8 data is exact, queries,
weights and anchors are rounded to 11 bits under a factor of their own. Scratch memory is bounded, but for fp32
[chunks, G, T] or [H, T] of what is kept of every position. No order of additions depends on which block comes first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from kvcompile.ops import launch
from kvcompile.ops.kv8.layout import fail
from kvcompile.ops.prune import positions, score_shape
from kvcompile.ops.prune.cuda_projection import projected_norm
from kvcompile.ops.prune.methods import stages_of
from kvcompile.ops.prune.score_shape import MOST_REACH, TOKENS

FOLDER = Path(__file__).parent
STATS, MEANS, ANCHOR = FOLDER / "stats.cu", FOLDER / "means.cu", FOLDER / "anchor.cu"
ANCHOR_SUM, SCORE = FOLDER / "anchor_sum.cu", FOLDER / "score.cu"
KEY_DIFFERENCE, FINISH = FOLDER / "key_difference.cu", FOLDER / "finish.cu"
_REQUEST = "PqqPqPiifiiii"
SIGNATURES = {
    "prune_stats": _REQUEST + "P",
    "prune_means": _REQUEST + "iPiP",
    "prune_anchor": _REQUEST + "iiPPP",
    "prune_anchor_sum": "PPPiiiPP",
    "prune_score": _REQUEST + "iiPPPPi",
    "prune_key_sum": _REQUEST + "P",
    "prune_key_difference": _REQUEST + "iiPiP",
    "prune_sum_chunks": "PiiiiP",
    "prune_pool_means": "PiiiiiiiP",
    "prune_mean_heads": "PiiiiiP",
}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
THREADS = 256
WARPS = THREADS // 32
ANCHORED = ("andpro", "blend", "robust")
_RESIDENT = 2  # blocks on a multiprocessor


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
    """fp32 [stages, G, T] as `op.prune_score`, whose checks the arguments have passed."""
    _check(query, block_table_row, method, kernel)
    evictable = range(sink, max(sink, length - query.shape[0]))
    span = slice(evictable.start, evictable.stop)
    shape = (stages_of(method), kv_cache.shape[3], length)
    if not evictable or method in ("streaming", "random"):
        scores = torch.zeros(shape, dtype=torch.float32, device=query.device)
        if evictable and method == "streaming":
            scores[0, :, span] = positions.recency(length, query.device)[span]
        elif evictable:
            scores[0, :, span] = positions.uniform(seed, length, query.device)[span]
        return scores
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    rows = _Observation(query[-1:] if method == "tova" else query, kv_cache, block_table_row, length, scale, evictable)
    if method in ANCHORED:
        last = rows.anchored(scores[0], kernel // 2, method != "andpro", method == "robust")
        if last is not None:
            rows.mean_heads(last, scores[1])
        if method == "robust":
            rows.mean_heads(rows.key_difference(), scores[2])
    elif method == "keydiff":
        scores.copy_(rows.key_difference())
    elif method == "tova":
        rows.mean_heads(rows.means(), scores[0])
    elif method in ("snapkv", "critical"):
        rows.pool_means(rows.means(), kernel // 2, scores[0])
        if method == "critical":
            norm = projected_norm(kv_cache, block_table_row, evictable, output_weight, query.shape[1])
            scores[1].zero_()
            scores[1, :, span] = (scores[0, :, span] + epsilon) * norm
    else:
        raise ValueError(f"prune_score: method: given {method!r}, of which there are no scores on {query.device}")
    return scores


def _check(query: torch.Tensor, block_table_row: torch.Tensor, method: str, kernel: int) -> None:
    """Raise ValueError for what the CPU takes and these kernels do not."""
    op = "prune_score"
    if query.dtype not in DTYPES:
        fail(op, "query", f"{query.dtype} on {query.device}", ", ".join(map(str, DTYPES)))
    if query.stride(2) != 1 or query.stride(0) % 4 or query.stride(1) % 4 or query.storage_offset() % 4:
        given = f"strides {query.stride()} from element {query.storage_offset()}"
        fail(op, "query", given, "stride 1 within a head; tokens and heads that begin at multiples of 4 elements")
    if block_table_row.stride(0) != 1:
        fail(op, "block_table_row", f"strides {block_table_row.stride()}", "a contiguous tensor")
    if method in ANCHORED and kernel // 2 > MOST_REACH:
        fail(op, "kernel", kernel, f"an odd number from 1 to {2 * MOST_REACH + 1} for {method} on {query.device}")


class _Observation:
    """The observation rows of one layer of a request, and the kernels over them."""

    def __init__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table_row: torch.Tensor,
        length: int,
        scale: float,
        evictable: range,
    ) -> None:
        self.query, self.length = query, length
        self.low, self.high = evictable.start, evictable.stop
        self.window, self.heads, self.head_size = query.shape
        self.kv_heads = kv_cache.shape[3]
        self.ratio = self.heads // self.kv_heads
        self.device = query.device
        self.shape = _shape(self.device, self.head_size, self.window, self.ratio)
        self.defines = {"D": self.head_size, "ROWS": self.shape.rows, "DTYPE": DTYPES[query.dtype]}
        self.request = (
            *(query, query.stride(0), query.stride(1), kv_cache, kv_cache.stride(0), block_table_row),
            *(kv_cache.shape[2], length, scale, self.window, self.ratio, self.shape.heads_per_chunk, self.shape.parts),
        )

    def anchored(self, scores: torch.Tensor, reach: int, with_last: bool, pool_last: bool) -> torch.Tensor | None:
        """AnDPro's scores into `scores` [G, T]; if asked for, what the last queries attend to [H, T], pooled or not."""
        rows = self.kv_heads * self.shape.chunks * self.shape.rows
        inner, span = TOKENS - 2 * reach, (self.low, self.high)
        threads = 2 * self.shape.rows
        splits = self._splits(-(-self.length // inner))
        stats, units = self._empty(splits, rows, 2), self._empty(splits, self.kv_heads)
        partial = self._empty(splits, rows, self.head_size)
        self._launch(
            *(ANCHOR, "prune_anchor", splits, (*span, stats, units, partial)),
            score_shape.tile_bytes(self.head_size, self.shape.rows),
            threads=threads,
            REACH=reach,
        )
        anchors = self._empty(rows, self.head_size, dtype=torch.float16)
        facts = self._empty(rows, 4)
        _kernel(ANCHOR_SUM, "prune_anchor_sum", self.device, D=self.head_size)(
            (rows // WARPS, 1, 1),
            THREADS,
            (stats, units, partial, splits, self.kv_heads, rows, anchors, facts),
            programmatic=True,
        )
        whole = self.shape.chunks == 1
        parts = scores if whole else self._empty(self.shape.chunks, self.kv_heads, self.length)
        last = self._empty(self.heads, self.length) if with_last else None
        self._launch(
            *(SCORE, "prune_score", self._splits(-(-(self.high - self.low) // inner))),
            (*span, anchors, facts, parts, last, pool_last),
            score_shape.tile_bytes(self.head_size, self.shape.rows),
            threads=threads,
            REACH=reach,
        )
        if not whole:
            self._finish("prune_sum_chunks", self.kv_heads, (parts, self.shape.chunks, self.length, *span, scores))
        return last

    def means(self) -> torch.Tensor:
        """Attention summed over the window, or over each of its parts: [parts, H, T], to the last evictable token."""
        stats = self._stats()
        sums = self._empty(self.shape.parts, self.heads, self.length)
        self._launch(
            *(MEANS, "prune_means", self._splits(-(-self.high // TOKENS)), (self.high, stats, stats.shape[0], sums)),
            score_shape.means_bytes(self.head_size, self.shape.rows),
        )
        return sums

    def key_difference(self) -> torch.Tensor:
        """KeyDiff's scores [G, T], 0 for tokens that are not evictable."""
        splits = self._splits(-(-self.length // TOKENS))
        sums = self._empty(splits, self.kv_heads, self.head_size)
        self._launch(KEY_DIFFERENCE, "prune_key_sum", splits, (sums,), 0, chunks=1)
        scores = self._empty(self.kv_heads, self.length)
        args = (self.low, self.high, sums, splits, scores)
        self._launch(KEY_DIFFERENCE, "prune_key_difference", splits, args, 0, chunks=1)
        return scores

    def pool_means(self, sums: torch.Tensor, reach: int, scores: torch.Tensor) -> None:
        args = (sums, self.shape.parts, self.ratio, self.window, reach, self.length, self.low, self.high, scores)
        self._finish("prune_pool_means", self.kv_heads, args)

    def mean_heads(self, of_heads: torch.Tensor, scores: torch.Tensor) -> None:
        """The mean over all heads of `of_heads` [any number, T], or [1, any number, T], into every row of `scores`."""
        args = (of_heads, of_heads.shape[-2], self.kv_heads, self.length, self.low, self.high, scores)
        self._finish("prune_mean_heads", 1, args)

    def _stats(self) -> torch.Tensor:
        """Softmax statistics [splits, G, chunks, rows, 2]."""
        splits = self._splits(-(-self.length // TOKENS))
        stats = self._empty(splits, self.kv_heads, self.shape.chunks, self.shape.rows, 2)
        shared_bytes = score_shape.stats_bytes(self.head_size, self.shape.rows)
        self._launch(STATS, "prune_stats", splits, (stats,), shared_bytes)
        return stats

    def _splits(self, tiles: int) -> int:
        resident = _RESIDENT * torch.cuda.get_device_properties(self.device).multi_processor_count
        return max(1, min(tiles, resident // (self.kv_heads * self.shape.chunks)))

    def _launch(
        self,
        source: Path,
        name: str,
        splits: int,
        args: tuple,
        shared_bytes: int,
        chunks: int | None = None,
        threads: int = THREADS,
        **defines: int,
    ) -> None:
        _kernel(source, name, self.device, **self.defines, **defines)(
            (splits, self.kv_heads, chunks or self.shape.chunks),
            threads,
            (*self.request, *args),
            shared_bytes=shared_bytes,
            programmatic=True,
        )

    def _finish(self, name: str, heads: int, args: tuple) -> None:
        grid = (-(-self.length // THREADS), heads, 1)
        _kernel(FINISH, name, self.device)(grid, THREADS, args, programmatic=True)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


@cache
def _shape(device: torch.device, head_size: int, window: int, ratio: int) -> score_shape.ScoreShape:
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return score_shape.score_shape(head_size, window, ratio, shared_bytes)


@cache
def _kernel(source: Path, name: str, device: torch.device, **defines: int) -> launch.Kernel:
    return launch.kernel(source, name, device, defines, signature=SIGNATURES[name])
