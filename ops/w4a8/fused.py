"""How the fused kernels are cut to a shape and a GPU: blocks, clusters, shared memory. Arithmetic only, no launch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvcompile.ops.w4a8.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, tiles_along

TOKEN_TILES = (1, 2, 4, 8)  # tiles of 8 tokens that a block can hold
WGMMA_TOKEN_TILES = (2, 4, 8, 16)
REGISTERS = 65536  # of a multiprocessor, on every architecture from 8.0 on
_TOKEN_TILE = 8
_GROUP_BYTES = 2 * TILE_ROWS
WGMMA_ROW_TILES = 4


class Tiling(NamedTuple):
    """What is free to choose: the numbers that `kvcompile bench w4a8 --tune` measures.

    row_tiles: tiles of 16 output channels that share one read of the activations: 1 or 2 (fused.cu), or 4, which is the
    kernel for Hopper (fused_wgmma.cu). warps: in a block; a multiple of 4 there. stages: steps of weights that a warp
    has in shared memory. split: blocks of a cluster, which divide the input channels (1 below compute capability 9.0).
    blocks: resident on a multiprocessor at once.
    """

    row_tiles: int
    warps: int
    stages: int
    split: int
    blocks: int

    @property
    def wgmma(self) -> bool:
        return self.row_tiles == WGMMA_ROW_TILES


class Plan(NamedTuple):
    """A launch: grid along x and y, bytes of dynamic shared memory, and what the kernel is told of them."""

    grid: tuple[int, int, int]
    shared_bytes: int
    phase_steps: int
    most_units: int


def check_tiling(tiling: Tiling) -> None:
    """Raise ValueError, naming field and range, for a tiling that no kernel is written for."""
    ranges = {
        "row_tiles": (1, 2, WGMMA_ROW_TILES),
        "warps": range(4, 33, 4) if tiling.wgmma else range(4, 33),
        "stages": range(2, 33),
        "split": (1, 2, 4, 8),
        "blocks": range(1, 9),
    }
    for name, allowed in ranges.items():
        if getattr(tiling, name) not in allowed:
            raise ValueError(
                f"{name} is {getattr(tiling, name)} in {tiling}; allowed are {', '.join(map(str, allowed))}"
            )


def token_tiles(tokens: int, *, wgmma: bool = False) -> int:
    """The least number of tiles of 8 tokens that there is a kernel for and that holds all, or the greatest there is."""
    sizes = WGMMA_TOKEN_TILES if wgmma else TOKEN_TILES
    return next((n for n in sizes if tokens <= n * _TOKEN_TILE), sizes[-1])


def step_tiles(columns: int, groups: int) -> int:
    """Tiles of 64 input channels in a step: 2 where groups and rows are made of whole pairs."""
    return 1 if (columns if groups == 1 else columns // groups) % (2 * TILE_COLUMNS) else 2


def group_steps(columns: int, groups: int) -> int:
    """Steps in a group; a single group has all of them."""
    return tiles_along(columns // groups, step_tiles(columns, groups) * TILE_COLUMNS)


def fits_registers(tiling: Tiling, tokens: int, one_group: bool = True) -> bool:
    """Whether the threads of `tiling.blocks` blocks find the registers that the sums of so many tokens take.

    one_group: whether a step is a group, which takes fewer. The needs are those that ptxas was seen to meet without
    spills, in steps; test_kernels_compile.py holds them to it.
    """
    tiles = token_tiles(tokens, wgmma=tiling.wgmma)
    if tiling.wgmma:
        needed = 104 if tiles <= 4 else 128
    else:
        few = 64 if one_group else 85
        needed = few if tiles == 1 else {2: 96, 4: 128, 8: 256}.get(tiles * tiling.row_tiles)
        if needed is None:  # more sums than a thread can have registers for
            return False
    return 32 * tiling.warps * tiling.blocks * needed <= REGISTERS


def defines(tiling: Tiling, tokens: int, columns: int, groups: int, out: int) -> dict[str, int]:
    """The macros of the kernel. `out`: 0 bf16, 1 fp16, 2 fp32, 3 the int32 sums."""
    tiles = token_tiles(tokens, wgmma=tiling.wgmma)
    common = {
        "NT": tiles,
        "R": tiling.row_tiles,
        "U": step_tiles(columns, groups),
        "WARPS": tiling.warps,
        "STAGES": tiling.stages,
        "SPLIT": tiling.split,
        "ONE_GROUP": int(group_steps(columns, groups) == 1),
        "OUT": out,
    }
    if tiling.wgmma:
        return {**common, "RESIDENT": tiling.blocks}
    # A second block must find registers while the first still runs: the next product's, which fetches its weights.
    resident = max(tiling.blocks, 2 if tiles == 1 and tiling.warps <= 16 and common["ONE_GROUP"] else 1)
    return {**common, "RESIDENT": resident}


@lru_cache(maxsize=4096)
def plan(
    tokens: int, rows: int, columns: int, groups: int, tiling: Tiling, clusters: int, shared_limit: int
) -> Plan | None:
    """The launch for these sizes, or None if the tiling does not fit the GPU's registers or shared memory.

    clusters: of `tiling.split` blocks, resident at once. shared_limit: bytes of shared memory of one multiprocessor,
    which its `tiling.blocks` blocks divide.
    """
    if not fits_registers(tiling, tokens, group_steps(columns, groups) == 1):
        return None
    if tiling.split > tiles_along(columns, step_tiles(columns, groups) * TILE_COLUMNS):
        return None  # a block without a step
    block_tokens = token_tiles(tokens, wgmma=tiling.wgmma) * _TOKEN_TILE
    token_blocks = tiles_along(tokens, block_tokens)
    units = tiles_along(tiles_along(rows, TILE_ROWS), tiling.row_tiles)
    width = step_tiles(columns, groups) * TILE_COLUMNS
    steps = tiles_along(tiles_along(columns, width), tiling.split)
    most_groups = min(steps // group_steps(columns, groups) + 2, groups)
    # A sum for each row and token, a scale for each row.
    unit_bytes = tiling.row_tiles * (TILE_ROWS * (block_tokens + 1) * 4 + most_groups * _GROUP_BYTES)
    stages = tiling.warps * tiling.stages * width // TILE_COLUMNS * TILE_BYTES
    if tiling.wgmma:
        # Activations of all tokens that the block has room for.
        row_bytes, step_bytes = 0, block_tokens * width
    else:
        # Rows of the tokens there are, with up to one tile between them, and a sum for each step and token.
        held = min(tokens, block_tokens)
        stages *= tiling.row_tiles
        row_bytes, step_bytes = held * TILE_COLUMNS, held * width + block_tokens * 4
    # As many clusters as are resident at once, and no more than it takes to give each the same number of units.
    clusters = tiles_along(units, tiles_along(units, min(max(clusters, 1), units)))
    while True:
        most_units = tiles_along(units, clusters)
        fixed = stages + most_units * unit_bytes + row_bytes + block_tokens * 4
        phase_steps = min((shared_limit // tiling.blocks - fixed) // step_bytes, steps)
        if phase_steps >= min(steps, 4):
            grid = (clusters * tiling.split, token_blocks, 1)
            return Plan(grid, fixed + phase_steps * step_bytes, phase_steps, most_units)
        if most_units == 1:
            return None
        clusters = tiles_along(units, most_units - 1)  # fewer sums in each block, more waves of blocks
