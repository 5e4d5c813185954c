"""The kernels of block_copy.cu for the layers of one cache: one launch copies pages of all layers, either way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvcompile.ops import launch
from kvcompile.ops.block_copy.ring import Ring

SOURCE = Path(__file__).with_name("block_copy.cu")
SIGNATURES = {"block_copy_store": "PiPPPqiii", "block_copy_load": "PiPPPqiii"}
THREADS = 512
WARPS = THREADS // 32
VECTOR_BYTES = 16
# Thread blocks of a launch: as few multiprocessors as keep the link to the host busy, as the rest computes. On an H200
# 4 reach 85 % of it with 64 pages of 1 MB and 92 % with many, 8 reach 88 and 94, and more add nothing one way.
THREAD_BLOCKS = 8


class BlockCopy:
    """layers: uint8 [blocks, bytes] each, on one device; a row of the pool holds a page of all of them in this order.

    thread_blocks: of a launch, at most. Raises ValueError for layers that the kernels cannot copy, and what
    `launch.kernel` raises.
    """

    def __init__(self, layers: Sequence[torch.Tensor], thread_blocks: int = THREAD_BLOCKS) -> None:
        widths = check_layers(layers)
        offsets = np.cumsum([0, *widths]).tolist()
        self.device, self.row_bytes = layers[0].device, offsets.pop()
        self._layers, self._thread_blocks = list(layers), thread_blocks  # the table has the layers' addresses
        table = [
            (layer.data_ptr(), layer.stride(0), offset, width // VECTOR_BYTES)
            for layer, offset, width in zip(layers, offsets, widths, strict=True)
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=self.device)
        self._store, self._load = (
            launch.kernel(SOURCE, name, self.device, signature=letters) for name, letters in SIGNATURES.items()
        )

    def store(self, rows: torch.Tensor, ring: Ring, begin: int, count: int) -> None:
        """Copy the pages of `count` entries of the ring from `begin` on into their rows, on torch's current stream.

        rows: uint8 [slots, row_bytes], packed, which the device can address.
        """
        self._launch(self._store, rows, ring, begin, count)

    def load(self, rows: torch.Tensor, ring: Ring, begin: int, count: int) -> None:
        """The same from rows into pages."""
        self._launch(self._load, rows, ring, begin, count)

    def _launch(self, kernel: launch.Kernel, rows: torch.Tensor, ring: Ring, begin: int, count: int) -> None:
        layers = len(self._layers)
        grid = min(self._thread_blocks, -(-count * layers // WARPS))
        addresses = self._table, layers, ring.moves.ctypes.data, ring.sums.ctypes.data, rows
        kernel((grid, 1, 1), THREADS, (*addresses, self.row_bytes, begin, count, ring.capacity))


def check_layers(layers: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of a page of each layer. Raises ValueError, naming the layer by its place, what it has and what may be."""
    for number, layer in enumerate(layers):
        if layer.device != layers[0].device:
            raise ValueError(f"layer {number} of the cache is on {layer.device}, and layer 0 on {layers[0].device}")
        found = {"address": layer.data_ptr(), "bytes of a page": layer.shape[1]}
        if layer.shape[0] > 1:
            found["bytes from one block to the next"] = layer.stride(0)
        for what, value in found.items():
            if value % VECTOR_BYTES:
                raise ValueError(
                    f"layer {number} of the cache: {what}: given {value}, allowed are multiples of {VECTOR_BYTES}"
                )
    return [layer.shape[1] for layer in layers]
