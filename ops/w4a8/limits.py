"""What a GPU sets for the W4A8 kernels: how a product may be cut, and the rates that the cost model reckons with."""

from __future__ import annotations

from typing import NamedTuple

from kvcompile.ops.w4a8 import fused
from kvcompile.ops.w4a8.fused import Plan, Tiling

RESERVED_SHARED_BYTES = 1024  # that the system takes of every resident block


class Limits(NamedTuple):
    """One kind of GPU. Hashable: what is decided for it is remembered by it.

    shared_bytes: of one multiprocessor, for all its blocks together. clusters: at index n, how many clusters of n
    blocks are resident at once with one block on a multiprocessor; 0 where there are none. bandwidth: of device
    memory, bytes per second, nominal. clock: of the multiprocessors at most, Hz.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    clusters: tuple[int, ...]
    bandwidth: float
    clock: float

    def has(self, tiling: Tiling) -> bool:
        """Whether this kind of GPU has what a tiling is made of: wgmma on Hopper alone, clusters from there on."""
        if tiling.wgmma and self.capability != (9, 0):
            return False
        return tiling.split < len(self.clusters) and self.clusters[tiling.split] > 0

    def plan(self, tokens: int, rows: int, columns: int, groups: int, tiling: Tiling) -> Plan | None:
        """The launch of the fused kernel, or None if this GPU cannot run the tiling or has too little shared memory."""
        if not self.has(tiling):
            return None
        shared = self.shared_bytes - tiling.blocks * RESERVED_SHARED_BYTES
        return fused.plan(tokens, rows, columns, groups, tiling, tiling.blocks * self.clusters[tiling.split], shared)
