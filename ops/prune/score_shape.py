"""How the observation rows of a KV head are cut into chunks for the scoring kernels (observe.cuh), and their memory."""

from __future__ import annotations

from typing import NamedTuple

TOKENS = 64  # of a tile
MOST_REACH = 16  # neighbours to either side that a tile of AnDPro's kernels may need and not score
STATIC_BYTES = 8192  # of shared memory, more than any of the kernels has beside what is counted here


class ScoreShape(NamedTuple):
    """Rows of a chunk, whole query heads in it or parts of one that a head takes, chunks of a KV head."""

    rows: int
    heads_per_chunk: int
    parts: int
    chunks: int


def score_shape(head_size: int, window: int, ratio: int, shared_bytes: int) -> ScoreShape:
    """The shape for `window` queries of each of `ratio` query heads; shared_bytes: that a block of this GPU may have.

    The fewest rows that hold all of them, as far as registers and shared memory allow; 32 always fit.
    """
    most = 128 if head_size in (64, 128) else 64
    sizes = [rows for rows in (32, 64, 128) if rows <= most and _fits(head_size, rows, shared_bytes)]
    rows = next((rows for rows in sizes if rows >= window * ratio), sizes[-1])
    parts = -(-window // rows)
    heads = min(ratio, rows // window) if parts == 1 else 1
    return ScoreShape(rows, heads, parts, -(-ratio // heads) * parts)


def _fits(head_size: int, rows: int, shared_bytes: int) -> bool:
    needed = max(tile_bytes(head_size, rows), means_bytes(head_size, rows))
    return needed + STATIC_BYTES <= shared_bytes


def stats_bytes(head_size: int, rows: int) -> int:
    """Dynamic shared memory of prune_stats."""
    return _rows(head_size, rows) + _tile(head_size)


def means_bytes(head_size: int, rows: int) -> int:
    """Of prune_means."""
    return stats_bytes(head_size, rows) + 4 * TOKENS * (rows + 1)


def tile_bytes(head_size: int, rows: int) -> int:
    """Of prune_anchor and prune_score: rows and a tile of tile.cuh, keys and values as they are and in fp16."""
    pitch = head_size // 2 + 4
    places = 1 if head_size > 128 else 2
    return 4 * (rows * pitch + places * (TOKENS * pitch + 32) + 2 * TOKENS * head_size // 4)


def _rows(head_size: int, rows: int) -> int:
    words = head_size // 2
    return 4 * rows * (words if words % 16 == 8 else words + 8)


def _tile(head_size: int) -> int:
    words = head_size // 4
    return 4 * TOKENS * (words if words % 8 == 4 else words + 4)
