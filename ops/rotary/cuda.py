"""Launches of rotary.cu, after the checks of `op.py`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kvcompile.ops import launch

SOURCE = Path(__file__).with_name("rotary.cu")
SIGNATURES = {"rotary": "PqPqPPPPiii"}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
WIDTH = 8  # pairs of a thread: 16 bytes of each half
MAX_THREADS = 256


class Split(NamedTuple):
    """How a launch covers the heads of one token: pairs of a thread, blocks, and threads of a block."""

    width: int
    blocks: int
    threads: int


@functools.cache
def split(head_size: int, heads: int, aligned: bool) -> Split:
    """Blocks of equal size, as few as there can be. `aligned`: to 8 elements, where they begin and how far apart."""
    width = WIDTH if aligned and head_size // 2 % WIDTH == 0 else 1
    threads = heads * (head_size // 2 // width)
    blocks = -(-threads // MAX_THREADS)
    return Split(width, blocks, -(-threads // (32 * blocks)) * 32)


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, settled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcompile::rotary` after its checks."""
    head_size = cos_sin_cache.shape[1]
    query_heads, heads = query.shape[1] // head_size, (query.shape[1] + key.shape[1]) // head_size
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % WIDTH == 0 for x in (query, key, cos_sin_cache))
    width, blocks, threads = split(head_size, heads, aligned)
    # The kernel waits for its predecessor before it touches what that one writes, and lets its successor start at once.
    _kernel(query.get_device(), head_size, query.dtype, width)(
        (query.shape[0], blocks, 1),
        threads,
        (
            *(query, query.stride(0), key, key.stride(0), positions, cos_sin_cache, *outputs),
            *(query_heads, heads, int(settled)),
        ),
        programmatic=True,
    )
    return outputs


@functools.cache
def _kernel(index: int, head_size: int, dtype: torch.dtype, width: int) -> launch.Kernel:
    defines = {"D": head_size, "DTYPE": DTYPES[dtype], "WIDTH": width}
    return launch.kernel(SOURCE, "rotary", torch.device("cuda", index), defines, signature=SIGNATURES["rotary"])
