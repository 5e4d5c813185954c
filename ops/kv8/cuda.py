"""The int8 cache on CUDA: launches of store.cu, plan.cu, decode.cu, combine.cu and dequantise.cu. See `op.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from kvcompile.ops import launch
from kvcompile.ops.kv8 import layout
from kvcompile.ops.kv8.decode_shape import DecodeShape, decode_shape

FOLDER = Path(__file__).parent
STORE, PLAN, DECODE = FOLDER / "store.cu", FOLDER / "plan.cu", FOLDER / "decode.cu"
COMBINE, DEQUANTISE = FOLDER / "combine.cu", FOLDER / "dequantise.cu"
SIGNATURES = {
    "kv8_store": "PPqqqqPiiPq",
    "kv8_plan": "PiPiPP",
    "kv8_decode": "PqPqPiPPPifPPPi",
    "kv8_combine": "PiiPPPii",
    "kv8_dequantise": "PqPiPPiiiPP",
}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
WARPS = 8  # of a block, in all kernels but kv8_decode and kv8_plan
PLAN_THREADS = 1024
ALIGNMENT = 16  # bytes, of bulk copies


class Decode(NamedTuple):
    """The kernels of one kind of cache and query on one device, and how they are launched."""

    decode: launch.Kernel
    combine: launch.Kernel
    shape: DecodeShape
    blocks: int  # pieces of the line


def store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `op.kv8_store`, whose checks the arguments have passed."""
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    dtype = _dtype("kv8_store", "key", key)
    for name, x in (("key", key), ("value", value)):
        _check_aligned("kv8_store", name, x, 4)
    pitches = key.stride(0), value.stride(0), key.stride(1), value.stride(1)
    _store_kernel(key.device, key.shape[2], dtype, kv_cache.shape[2])(
        (-(-tokens * heads * 2 // WARPS), 1, 1),
        WARPS * 32,
        (key, value, *pitches, slot_mapping, tokens, heads, kv_cache, kv_cache.stride(0)),
        programmatic=True,
    )


def plan(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    """Offsets int32 [R + 1] and first pages int32 [R] of a decode step: see plan.cu."""
    rows = seq_lens.shape[0]
    memory = seq_lens.new_empty(2 * rows + 1)
    found = [memory[: rows + 1], memory[rows + 1 :]]
    plan_into(block_table, seq_lens, block_size, *found)
    return found


def plan_into(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    offsets: torch.Tensor,
    first_page: torch.Tensor,
) -> None:
    """`plan` into memory that stays where it is, for a CUDA graph: int32 [R + 1 or more], [R or more]."""
    _plan_kernel(seq_lens.device, block_size)(
        (1, 1, 1),
        PLAN_THREADS,
        (block_table, block_table.stride(0), seq_lens, seq_lens.shape[0], offsets, first_page),
        programmatic=True,
    )


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor],
    settled: bool,
) -> None:
    """As `op.kv8_decode`, whose checks the arguments have passed."""
    (rows, heads, head_size), (_, _, block_size, kv_heads, _) = query.shape, kv_cache.shape
    if not rows:
        return
    dtype = _dtype("kv8_decode", "query", query)
    _check_aligned("kv8_decode", "query", query, 4)
    if query.stride(1) != head_size:
        layout.fail("kv8_decode", "query", f"strides {query.stride()}", f"heads of a row {head_size} apart")
    if not output.is_contiguous():
        layout.fail("kv8_decode", "output", f"strides {output.stride()}", "a contiguous tensor")
    if kv_cache.stride(0) % ALIGNMENT or kv_cache.data_ptr() % ALIGNMENT:
        given = f"a block stride of {kv_cache.stride(0)} at {kv_cache.data_ptr() % ALIGNMENT} past a multiple"
        layout.fail("kv8_decode", "kv_cache", given, f"blocks that begin at multiples of {ALIGNMENT} bytes")
    kernels = decode_kernels(query.device, head_size, kv_heads, heads // kv_heads, dtype, block_size)
    offsets, first_page = plan
    blocks, shape = kernels.blocks, kernels.shape
    partial = query.new_empty((2 * blocks, heads, head_size), dtype=torch.float32)
    stats = query.new_empty((2 * blocks, heads, 2), dtype=torch.float32)
    kernels.decode(
        (blocks, kv_heads // shape.group, 1),
        shape.threads,
        (
            *(query, query.stride(0), kv_cache, kv_cache.stride(0), block_table, block_table.stride(0), seq_lens),
            *(offsets, first_page, rows, scale, output, partial, stats, settled),
        ),
        shared_bytes=shape.shared_bytes,
        programmatic=True,
    )
    # Few rows are cut into many pieces each; of many rows, one at each cut is put together.
    shares = 8 if rows <= 16 else 2 if rows <= 64 else 1
    kernels.combine(
        (min(rows, blocks - 1), -(-heads * shares // WARPS), 1),
        WARPS * 32,
        (offsets, rows, blocks, partial, stats, output, heads, shares),
        programmatic=True,
    )


def dequantise(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """As `op.kv8_dequantise`, whose checks the arguments have passed."""
    tokens, heads, head_size = keys.shape
    dtype = _dtype("kv8_dequantise", "keys", keys)
    _dequantise_kernel(keys.device, head_size, dtype, kv_cache.shape[2])(
        (-(-tokens * heads // WARPS), 1, 1),
        WARPS * 32,
        (
            *(kv_cache, kv_cache.stride(0), block_table, block_table.stride(0), starts, begins),
            *(begins.shape[0], heads, tokens, keys, values),
        ),
        programmatic=True,
    )


def prepare(
    device: torch.device, head_size: int, kv_heads: int, ratio: int, dtype: torch.dtype, block_size: int
) -> None:
    """Compile and load every kernel that such a cache takes, so that no request waits for it. Raises as `decode`."""
    number = DTYPES[dtype]
    _plan_kernel(device, block_size)
    _store_kernel(device, head_size, number, block_size)
    _dequantise_kernel(device, head_size, number, block_size)
    decode_kernels(device, head_size, kv_heads, ratio, number, block_size)


@cache
def decode_kernels(
    device: torch.device, head_size: int, kv_heads: int, ratio: int, dtype: int, block_size: int
) -> Decode:
    """Raises ValueError if no shape of the kernel fits the device."""
    found = torch.cuda.get_device_properties(device)
    shape = decode_shape(head_size, kv_heads, ratio, found.shared_memory_per_block_optin)
    if shape is None:
        heads = f"{kv_heads} KV heads of {head_size} with {ratio} query heads each"
        raise ValueError(f"kvcompile::kv8_decode: {heads} do not fit the shared memory of {found.name}")
    defines = decode_defines(head_size, kv_heads, ratio, dtype, block_size, shape)
    combine = {name: defines[name] for name in ("D", "DTYPE", "BS")}
    return Decode(
        _kernel(DECODE, "kv8_decode", device, **defines),
        _kernel(COMBINE, "kv8_combine", device, **combine),
        shape,
        # One block on a multiprocessor.
        max(1, found.multi_processor_count // (kv_heads // shape.group)),
    )


def decode_defines(
    head_size: int, kv_heads: int, ratio: int, dtype: int, block_size: int, shape: DecodeShape
) -> dict[str, int]:
    """What decode.cu is compiled with."""
    return {
        "D": head_size,
        "DTYPE": dtype,
        "HEADS": kv_heads,
        "GROUP": shape.group,
        "SHARING": shape.sharing,
        "RATIO": ratio,
        "BS": block_size,
        "STAGES": shape.stages,
    }


@cache
def _plan_kernel(device: torch.device, block_size: int) -> launch.Kernel:
    return _kernel(PLAN, "kv8_plan", device, BS=block_size)


@cache
def _store_kernel(device: torch.device, head_size: int, dtype: int, block_size: int) -> launch.Kernel:
    return _kernel(STORE, "kv8_store", device, D=head_size, DTYPE=dtype, BS=block_size)


@cache
def _dequantise_kernel(device: torch.device, head_size: int, dtype: int, block_size: int) -> launch.Kernel:
    return _kernel(DEQUANTISE, "kv8_dequantise", device, D=head_size, DTYPE=dtype, BS=block_size)


def _kernel(source: Path, name: str, device: torch.device, **defines: int) -> launch.Kernel:
    return launch.kernel(source, name, device, defines, signature=SIGNATURES[name])


def _dtype(op: str, name: str, x: torch.Tensor) -> int:
    if x.dtype not in DTYPES:
        layout.fail(op, name, f"{x.dtype} on {x.device}", ", ".join(map(str, DTYPES)))
    return DTYPES[x.dtype]


def _check_aligned(op: str, name: str, x: torch.Tensor, elements: int) -> None:
    """Vectors are read in units of `elements`."""
    if x.stride(0) % elements or x.stride(1) % elements or x.storage_offset() % elements:
        given = f"strides {x.stride()} from element {x.storage_offset()}"
        layout.fail(op, name, given, f"tokens and heads that begin at multiples of {elements} elements")
