"""block_copy.cu itself, compiled for the CPU: one thread after the other does what a GPU's would, on a CPU's tensors.

All that is put in its place is the sum over a warp, for which lanes have to run side by side: each adds to memory.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcompile.ops.block_copy import cuda

SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct Place { unsigned x, y, z; };
static Place blockIdx, threadIdx, gridDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> void __stcs(T* at, T value) { *at = value; }
"""
REDUCTION = "for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);"
WRITE = "if (lane == 0) sums[at * layer_count + number] = sum;"
RUN = """
extern "C" void run(bool store, int grid, int threads, const void* layers, int layer_count, const int* moves,
                    unsigned long long* sums, unsigned char* rows, long long row_bytes, int begin, int count,
                    int capacity) {
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            (store ? block_copy_store : block_copy_load)(layers, layer_count, moves, sums, rows, row_bytes, begin,
                                                         count, capacity);
}
"""


@functools.cache
def _library() -> ctypes.CDLL:
    source = cuda.SOURCE.read_text()
    assert (source.count(REDUCTION), source.count(WRITE)) == (1, 1)
    source = source.replace(REDUCTION, "")
    source = source.replace(WRITE, f"{WRITE} else sums[at * layer_count + number] += sum;")
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "block_copy.cpp"), Path(folder, "block_copy.so")
        file.write_text(SHIM + source + RUN)
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, file], check=True)
        return ctypes.CDLL(str(library))


TYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_longlong}


def kernel(source: Path, name: str, device: torch.device, *, signature: str) -> Callable[..., None]:
    """In the place of `launch.kernel`."""
    assert source == cuda.SOURCE

    def run(grid: tuple[int, int, int], block: int, args: tuple[Any, ...]) -> None:
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        given = [TYPES[letter](value) for letter, value in zip(signature, values, strict=True)]
        _library().run(name == "block_copy_store", grid[0], block, *given)

    return run
