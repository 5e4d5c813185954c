"""`prune_compact` and `prune_copy` on CUDA: launches of compact.cu and copy.cu. Nothing waits for the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from kvcompile.ops import launch
from kvcompile.ops.kv8.layout import SCALE_BYTES

FOLDER = Path(__file__).parent
COMPACT, COPY = FOLDER / "compact.cu", FOLDER / "copy.cu"
LAYERS = 16  # of one launch, whose addresses are parameters of the kernel
SIGNATURES = {"prune_compact": "PqP" * LAYERS + "Piii", "prune_copy": "PqPiPqPiPiii"}
THREADS = 256
WARPS = THREADS // 32


def compact(
    kv_caches: list[torch.Tensor],
    block_table_row: torch.Tensor,
    keeps: list[torch.Tensor],
    length: int,
    first: int,
) -> None:
    """As `op_move.prune_compact`, whose checks the arguments have passed."""
    if first == 0:  # every token is kept, and lies where it belongs
        return
    alike: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for kv_cache, keep in zip(kv_caches, keeps, strict=True):
        alike.setdefault(tuple(kv_cache.shape[3:]), []).append((kv_cache, keep.contiguous()))
    for (kv_heads, width), layers in alike.items():
        kernel = _kernel(COMPACT, "prune_compact", block_table_row.device, width - SCALE_BYTES)
        for begin in range(0, len(layers), LAYERS):
            some = layers[begin : begin + LAYERS]
            addresses = [x for kv_cache, keep in some for x in (kv_cache, kv_cache.stride(0), keep)]
            addresses += [None, 0, None] * (LAYERS - len(some))
            tail = block_table_row, kv_caches[0].shape[2], length - first, first
            kernel((kv_heads, 2, len(some)), THREADS, (*addresses, *tail), programmatic=True)


def copy(
    source_cache: torch.Tensor,
    source_row: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    keep: torch.Tensor,
    first: int,
) -> None:
    """As `op_move.prune_copy`, whose checks the arguments have passed."""
    (kv_heads, kept), width = keep.shape, kv_cache.shape[4]
    _kernel(COPY, "prune_copy", keep.device, width - SCALE_BYTES)(
        (-(-kept * kv_heads * 2 // WARPS), 1, 1),
        THREADS,
        (
            *(source_cache, source_cache.stride(0), source_row, source_cache.shape[2]),
            *(kv_cache, kv_cache.stride(0), block_table_row, kv_cache.shape[2]),
            *(keep.contiguous(), kv_heads, kept, first),
        ),
        programmatic=True,
    )


@cache
def _kernel(source: Path, name: str, device: torch.device, head_size: int) -> launch.Kernel:
    return launch.kernel(source, name, device, {"D": head_size}, signature=SIGNATURES[name])
