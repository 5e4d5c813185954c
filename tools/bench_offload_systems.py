"""The systems that `kvcompile bench offload` compares: ways to copy pages of all layers to pinned memory and back.

All of them copy blocks of the same caches to slots of a pool of their own, and back, and return before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvcompile.integrations.vllm.offload_copies import pages_of
from kvcompile.integrations.vllm.offload_copies_cuda import CUDACopies
from kvcompile.ops.block_copy.pinned import pinned
from kvcompile.tools.bench_w4a8_systems import Unavailable

LINK_BYTES = 1 << 30


class System(Protocol):
    """start_store, start_load: as of `Copies`."""

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> object: ...

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> object: ...

    def row(self, slot: int) -> torch.Tensor:
        """uint8 [bytes]: what a slot holds, layer by layer."""


class KVCompile(CUDACopies):
    """What serves, with `make` of its own or not: the kernel reads and writes pinned memory."""

    def row(self, slot: int) -> torch.Tensor:
        return self._pool[slot]

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        self.ended()  # whose entries of the ring are free again
        return super().start_store(blocks, slots)

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        self.ended()
        return super().start_load(slots, blocks)


class VLLM:
    """vLLM's own: cuMemcpyBatchAsync, a copy for each page and layer."""

    def __init__(self, caches: Sequence[torch.Tensor], slots: int) -> None:
        try:
            from vllm.v1.simple_kv_offload import cuda_mem_ops
        except ImportError as error:
            raise Unavailable(str(error)) from error
        layers = [pages_of(cache) for cache in caches]
        device = layers[0].device
        self._host = [pinned(slots * layer.shape[1], device).view(slots, -1) for layer in layers]
        self._copy_blocks = cuda_mem_ops.copy_blocks
        ours = {str(i): layer for i, layer in enumerate(layers)}
        theirs = {str(i): layer for i, layer in enumerate(self._host)}
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        try:
            self._store = cuda_mem_ops.build_params(ours, theirs, self._streams[0])
            self._load = cuda_mem_ops.build_params(theirs, ours, self._streams[1])
        except RuntimeError as error:
            raise Unavailable(str(error)) from error

    def row(self, slot: int) -> torch.Tensor:
        return torch.cat([layer[slot] for layer in self._host])

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._streams[0].wait_stream(torch.cuda.current_stream())
        self._copy_blocks(blocks, slots, self._store)

    def start_load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._streams[1].wait_stream(torch.cuda.current_stream())
        self._copy_blocks(slots, blocks, self._load)


class Link:
    """Plain copies of 1 GiB between pinned memory and the device: what the link has to give."""

    def __init__(self, device: torch.device) -> None:
        self._host = [pinned(LINK_BYTES, device) for _ in range(2)]
        self._device = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def store(self) -> None:
        with torch.cuda.stream(self._streams[0]):
            self._host[0].copy_(self._device[0], non_blocking=True)

    def load(self) -> None:
        with torch.cuda.stream(self._streams[1]):
            self._device[1].copy_(self._host[1], non_blocking=True)


SYSTEMS: dict[str, Callable[[Sequence[torch.Tensor], int], System]] = {
    "kvcompile": KVCompile,
    "vllm-offload": VLLM,
}
