"""`w4a8_linear` on CUDA: the fused kernel for few tokens, a rebuilt weight and the platform's int8 product for many."""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path

import torch

from kvcompile.ops import launch
from kvcompile.ops.w4a8 import fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.layout import TILE_COLUMNS, TILE_ROWS, tiles_along
from kvcompile.ops.w4a8.limits import RESERVED_SHARED_BYTES, Limits

logger = logging.getLogger(__name__)

SOURCES = {wgmma: Path(__file__).with_name(f"fused{'_wgmma' * wgmma}.cu") for wgmma in (False, True)}
REBUILD = Path(__file__).with_name("rebuild.cu")
_FUSED = "P" * 7 + "i" * 7
SIGNATURES = {"w4a8_fused": _FUSED, "w4a8_fused_wgmma": _FUSED, "w4a8_rebuild": "PPPiiii"}
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.int32: 3}
REBUILD_TILES = 4  # along K, at once in a warp's registers
_REBUILD_WARPS = 8


@cache
def limits(device: torch.device) -> Limits:
    """The limits of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    clusters = [0, found.multi_processor_count]
    if found.major >= launch.CLUSTERS_AND_PDL:
        # So much shared memory that no second block finds room beside the first.
        shared = found.shared_memory_per_multiprocessor - RESERVED_SHARED_BYTES
        kernel, threads = _rebuild_kernel(device), _REBUILD_WARPS * 32
        sizes = range(2, launch.MAX_CLUSTER + 1)
        clusters += [kernel.resident_clusters(size, threads, shared) if size & (size - 1) == 0 else 0 for size in sizes]
    return Limits(
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_multiprocessor,
        clusters=tuple(clusters),
        # Two transfers in a clock; the clocks are in kHz, the bus in bits.
        bandwidth=2e3 * found.memory_clock_rate * found.memory_bus_width / 8,
        clock=1e3 * found.clock_rate,
    )


def linear(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `op.w4a8_linear`, whose checks the arguments have passed."""
    (tokens, columns), rows = x_q.shape, channel_scales.shape[0]
    if not tokens or not rows:
        return x_q.new_empty((tokens, rows), dtype=out_dtype)
    tiling = table.choose(limits(x_q.device), tokens, rows, columns, group_params.shape[1])
    if tiling is None:
        return rebuilt_linear(x_q, x_scale, tiles, group_params, channel_scales, bias, out_dtype)
    return fused_linear(x_q, x_scale, tiles, group_params, channel_scales, bias, out_dtype, tiling)


def prepare(device: torch.device, rows: int, columns: int, groups: int, out_dtype: torch.dtype) -> None:
    """Compile and load every kernel that a product with such a weight can take, so that no request waits for it.

    A few tenths of a second a kernel the first time, nothing once they are in the cache.
    """
    start = time.monotonic()
    found = limits(device)
    kernels = {_rebuild_kernel(device)}
    for tiling, tiles in table.kernels(found, rows, columns, groups):
        kernels.add(_fused_kernel(device, tiling, tiles, columns, groups, _OUT[out_dtype]))
    seconds = time.monotonic() - start
    if seconds > 1:
        logger.info("%d kernels for %d x %d linears compiled in %.0f s", len(kernels), rows, columns, seconds)


def fused_linear(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiling: Tiling,
) -> torch.Tensor:
    """The fused kernel, whatever the number of tokens. out_dtype int32 gives the bare sums.

    Raises ValueError if the tiling does not fit the GPU.
    """
    (tokens, columns), rows, groups = x_q.shape, channel_scales.shape[0], group_params.shape[1]
    device = limits(x_q.device)
    plan = device.plan(tokens, rows, columns, groups, tiling)
    if plan is None:
        raise ValueError(f"{tiling} for {tokens} x {rows} x {columns} does not fit {device.name}")
    y = x_q.new_empty((tokens, rows), dtype=out_dtype)
    token_tiles = fused.token_tiles(tokens, wgmma=tiling.wgmma)
    kernel = _fused_kernel(x_q.device, tiling, token_tiles, columns, groups, _OUT[out_dtype])
    kernel(
        plan.grid,
        tiling.warps * 32,
        (
            *(x_q, x_scale, tiles, group_params, channel_scales, bias, y, tokens, rows, columns, groups),
            *(fused.group_steps(columns, groups), plan.phase_steps, plan.most_units),
        ),
        shared_bytes=plan.shared_bytes,
        cluster=tiling.split,
        programmatic=True,
    )
    return y


def rebuilt_linear(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Rebuild the weight into a buffer that goes back to torch's allocator right after, then an int8 product."""
    weight = rebuild(tiles, group_params, channel_scales.shape[0], x_q.shape[1])
    return scaled_mm(x_q, weight, x_scale, channel_scales, bias, out_dtype)


def rebuild(tiles: torch.Tensor, group_params: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """w8', int8 [N, K]."""
    out = tiles.new_empty((out_features, in_features), dtype=torch.int8)
    pieces = tiles_along(tiles_along(in_features, TILE_COLUMNS), REBUILD_TILES)
    items = tiles_along(out_features, TILE_ROWS) * pieces
    groups = group_params.shape[1]
    group_tiles = tiles_along(in_features // groups, TILE_COLUMNS)
    _rebuild_kernel(out.device)(
        (tiles_along(items, _REBUILD_WARPS), 1, 1),
        _REBUILD_WARPS * 32,
        (tiles, group_params, out, out_features, in_features, groups, group_tiles),
        programmatic=True,
    )
    return out


def scaled_mm(
    x_q: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The W8A8 product: vLLM's CUTLASS kernel where that does it, else cuBLASLt's, scaled afterwards: slower."""
    rows, columns = weight.shape
    if takes_cutlass(limits(x_q.device).capability, rows, columns, out_dtype):
        y = x_q.new_empty((x_q.shape[0], rows), dtype=out_dtype)
        torch.ops._C.cutlass_scaled_mm(y, x_q, weight.t(), x_scale[:, None], channel_scales[None, :], bias)
        return y
    return _finish(_int_mm(x_q, weight), x_scale, channel_scales, bias, out_dtype)


def _int_mm(x_q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int32 [M, N]; cuBLASLt wants more than 16 rows and N a multiple of 8."""
    (tokens, _), rows = x_q.shape, weight.shape[0]
    if tokens < 17:
        x_q = torch.nn.functional.pad(x_q, (0, 0, 0, 17 - tokens))
    if rows % 8:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -rows % 8))
    return torch._int_mm(x_q, weight.t())[:tokens, :rows]


def _finish(
    sums: torch.Tensor,
    x_scale: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    y = sums.float().mul_(x_scale[:, None]).mul_(channel_scales)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def takes_cutlass(capability: tuple[int, int], rows: int, columns: int, out_dtype: torch.dtype) -> bool:
    """Whether vLLM's int8 kernel is there and does this product.

    It is registered on every GPU, and refuses int8 from compute capability 10.0 on.
    """
    legal = out_dtype != torch.float32 and rows % 16 == 0 and columns % 16 == 0
    # Asked each time: vLLM may load its extension after a first product.
    return legal and (8, 0) <= capability < (10, 0) and hasattr(torch.ops._C, "cutlass_scaled_mm")


@cache
def _fused_kernel(
    device: torch.device, tiling: Tiling, token_tiles: int, columns: int, groups: int, out: int
) -> launch.Kernel:
    defines = fused.defines(tiling, token_tiles * 8, columns, groups, out)
    source = SOURCES[tiling.wgmma]
    name = f"w4a8_{source.stem}"
    return launch.kernel(source, name, device, defines, signature=SIGNATURES[name])


@cache
def _rebuild_kernel(device: torch.device) -> launch.Kernel:
    name = "w4a8_rebuild"
    return launch.kernel(REBUILD, name, device, {"TILES": REBUILD_TILES}, signature=SIGNATURES[name])
