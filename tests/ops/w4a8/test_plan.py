"""How a product is cut: every part of it is somebody's, in memory that there is, whatever the shape and the GPU."""

from __future__ import annotations

import math
import random

import pytest

from kvcompile.ops.w4a8 import fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.limits import Limits
from tests.ops.w4a8.gpus import A100, GPUS, H200, RTX_3090

BLOCK_LIMIT = 1024  # bytes that a block can have less than its multiprocessor


def _cases(limits: Limits) -> list[tuple[int, int, int, int, Tiling]]:
    """Tokens, rows, columns, groups and tilings at random, the same every time."""
    dice = random.Random(limits.name)
    cases = []
    for _ in range(400):
        group = dice.choice((64, 128, 192, 256))
        columns = group * dice.randint(1, 130)
        groups = columns // group
        if dice.random() < 0.2:
            columns, groups = 16 * dice.randint(1, 1000), 1
        tokens = dice.choice((1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 129, 500))
        tiling = dice.choice(table.candidates(limits, tokens))
        cases.append((tokens, dice.randint(1, 30000), columns, groups, tiling))
    return cases


@pytest.mark.parametrize("limits", GPUS, ids=lambda gpu: gpu.name)
def test_every_unit_and_token_is_covered_in_the_memory_that_there_is(limits: Limits) -> None:
    planned = 0
    for tokens, rows, columns, groups, tiling in _cases(limits):
        plan = limits.plan(tokens, rows, columns, groups, tiling)
        if plan is None:
            continue
        planned += 1
        where = (tokens, rows, columns, groups, tiling, plan)
        clusters, rest = divmod(plan.grid[0], tiling.split)
        units = -(-rows // (16 * tiling.row_tiles))
        assert rest == 0 and 1 <= clusters <= units and plan.grid[2] == 1, where
        # As the kernel deals them: cluster c owns units c * units // clusters up to the next one's.
        most = max((c + 1) * units // clusters - c * units // clusters for c in range(clusters))
        assert most <= plan.most_units, where
        assert plan.grid[1] * fused.token_tiles(tokens, wgmma=tiling.wgmma) * 8 >= tokens, where
        steps = math.ceil(math.ceil(columns / (64 * fused.step_tiles(columns, groups))) / tiling.split)
        assert 1 <= plan.phase_steps <= steps, where
        assert plan.shared_bytes > 0, where
        assert tiling.blocks * (plan.shared_bytes + BLOCK_LIMIT) <= limits.shared_bytes, where
    assert planned > 200


def test_one_wave_of_clusters_gets_equal_shares() -> None:
    plan = H200.plan(1, 4096, 4096, 32, Tiling(1, 8, 4, 1, 2))
    # 256 units on 132 multiprocessors with two blocks each: one for each.
    assert plan is not None and plan.grid == (256, 1, 1) and plan.most_units == 1
    plan = H200.plan(1, 28672, 4096, 32, Tiling(1, 8, 4, 1, 1))
    # 1792 units on 132: 14 each, for which 128 clusters are enough.
    assert plan is not None and plan.grid == (128, 1, 1) and plan.most_units == 14


def test_clusters_that_the_driver_does_not_hold_at_once_are_not_reckoned_with() -> None:
    plan = H200.plan(1, 28672, 4096, 32, Tiling(1, 8, 4, 4, 1))
    # 30 clusters of 4, not 33.
    assert plan is not None and plan.grid[0] <= 4 * 30


def test_a_split_or_a_kernel_that_the_gpu_does_not_have_has_no_plan() -> None:
    assert A100.plan(1, 4096, 4096, 32, Tiling(1, 8, 4, 2, 1)) is None
    assert H200.plan(1, 4096, 4096, 32, Tiling(1, 8, 4, 3, 1)) is None
    assert H200.plan(1, 4096, 4096, 32, Tiling(1, 8, 4, 16, 1)) is None
    wgmma = Tiling(fused.WGMMA_ROW_TILES, 8, 4, 1, 1)
    assert H200.plan(32, 4096, 4096, 32, wgmma) is not None
    assert RTX_3090.plan(32, 4096, 4096, 32, wgmma) is None


def test_what_exceeds_the_shared_memory_has_no_plan() -> None:
    assert H200.plan(1, 4096, 4096, 32, Tiling(2, 16, 6, 1, 1)) is not None
    assert H200.plan(1, 4096, 4096, 32, Tiling(2, 16, 6, 1, 2)) is None
    assert RTX_3090.plan(1, 4096, 4096, 32, Tiling(2, 16, 6, 1, 1)) is None
