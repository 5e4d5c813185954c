"""How decode.cu is cut: KV heads of a block, its warps, and the tiles that shared memory holds, for a GPU's limits."""

from __future__ import annotations

from typing import NamedTuple

from kvcompile.ops.kv8.layout import SCALE_BYTES

TILE = 16  # tokens, in line.cuh
HEADS_PER_WARP = 8  # query heads: columns of a tensor-core product
WARPS = 8  # that compute, and more only where one KV head or an odd number of them needs them
# Two tiles are in flight while one is computed with; more only delays the first.
FEWEST_STAGES, MOST_STAGES = 2, 4
TAIL_BYTES = 128  # what the last word of a vector of 80 channels reads behind the last tile is less
STATIC_BYTES = 128  # two mbarriers a stage are less
MOST_THREADS = 1024
# Shared memory that one block may have, by compute capability.
SHARED_BYTES = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}


class DecodeShape(NamedTuple):
    """KV heads of a block, warps to a head, warps that compute, tiles in shared memory, dynamic bytes of that."""

    group: int
    sharing: int
    warps: int
    stages: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """One more warp copies."""
        return (self.warps + 1) * 32


def decode_shape(head_size: int, kv_heads: int, ratio: int, shared_bytes: int) -> DecodeShape | None:
    """The shape for `ratio` query heads to each of `kv_heads` KV heads of `head_size`; None if nothing fits.

    shared_bytes: shared memory that a block of this GPU may have. More KV heads of a token lie together in the
    cache, so a block takes as many as there are warps for; fewer, in multiples of 4 as copies are of 16 bytes, where
    shared memory is short.
    """
    groups = [g for g in range(kv_heads, 0, -1) if kv_heads % g == 0 and (g == kv_heads or g % 4 == 0)]
    head_warps = {g: g * -(-ratio // HEADS_PER_WARP) for g in groups}
    # The fewest warps, where a single KV head or an odd number of them needs more than there should be.
    groups = [g for g in groups if head_warps[g] <= WARPS] or groups[-1:]
    shapes = [
        shape
        for g in groups
        for sharing in (8, 4, 2, 1)
        if sharing == 1 or sharing * head_warps[g] <= WARPS
        if (shape := _shape(head_size, g, head_warps[g], sharing, shared_bytes))
    ]
    # A third tile keeps the copies going while a tile is handed over.
    return next((shape for least in (3, FEWEST_STAGES) for shape in shapes if shape.stages >= least), None)


def _shape(head_size: int, group: int, head_warps: int, sharing: int, shared_bytes: int) -> DecodeShape | None:
    warps = head_warps * sharing
    stage = 2 * TILE * group * (head_size + SCALE_BYTES)
    # All but the first of the warps that share a head hand over their sums, their maxima and those of probabilities.
    merge = (warps - head_warps) * 32 * (8 * -(-head_size // 32) + 4) * 4
    stages = min(MOST_STAGES, (shared_bytes - STATIC_BYTES - TAIL_BYTES - merge) // stage)
    if stages < FEWEST_STAGES or (warps + 1) * 32 > MOST_THREADS:
        return None
    return DecodeShape(group, sharing, warps, stages, stages * stage + merge + TAIL_BYTES)
