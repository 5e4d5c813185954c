"""The kernels of pruning compile for every architecture, without spills, in shapes that every GPU has room for."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.kv8.layout import HEAD_SIZES
from kvcompile.ops.prune import cuda, cuda_move, cuda_select, score_shape
from tests.ops.kv8.test_decode_shape import SHARED

# (window, query heads of a KV head): Llama 3, one head each, Qwen, one query, windows that take several chunks.
MODELS = [(32, 4), (32, 1), (32, 7), (32, 16), (1, 4), (64, 8), (300, 2), (8, 3), (48, 4)]


def _assert_no_spills(resources: dict[str, nvrtc.Resources], threads: int, what: str) -> None:
    for name, used in resources.items():
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), f"{what} {name}"
        assert used.registers * threads <= 65536, f"{what} {name}"
        assert used.shared_bytes <= score_shape.STATIC_BYTES + 4096, f"{what} {name}"


@pytest.mark.parametrize("arch", SHARED)
def test_the_kernels_that_score(arch: str) -> None:
    for head_size in HEAD_SIZES:
        # The most rows, in all kernels; other numbers of rows, neighbours and dtypes for one head size.
        most = score_shape.score_shape(head_size, 32, 16, SHARED[arch]).rows
        kinds = [(most, 0, 3)]
        if head_size == 128 and arch in ("sm_89", "sm_90a"):
            kinds += [(most, 1, 0), (most, 0, score_shape.MOST_REACH), (32, 0, 3), (64, 1, 3)]
        for rows, dtype, reach in kinds:
            defines = {"D": head_size, "ROWS": rows, "DTYPE": dtype}
            for source in (cuda.ANCHOR, cuda.SCORE):
                resources = nvrtc.compile(source, arch, {**defines, "REACH": reach}).resources
                _assert_no_spills(resources, cuda.THREADS, f"{arch} {defines} {reach}")
            if head_size in (80, 128):  # with the least to spare, and without words for some lanes
                for source in (cuda.STATS, cuda.MEANS, cuda.KEY_DIFFERENCE):
                    _assert_no_spills(nvrtc.compile(source, arch, defines).resources, cuda.THREADS, f"{arch} {defines}")


@pytest.mark.parametrize("arch", SHARED)
def test_the_kernels_that_sum_select_and_move(arch: str) -> None:
    found = {}
    for head_size in (80, 256):
        for source in (cuda.ANCHOR_SUM, cuda_move.COMPACT, cuda_move.COPY):
            resources = nvrtc.compile(source, arch, {"D": head_size}).resources
            _assert_no_spills(resources, cuda.THREADS, f"{arch} {source.name} {head_size}")
            found |= resources
    for source, threads in ((cuda.FINISH, cuda.THREADS), (cuda_select.SELECT, cuda_select.THREADS)):
        resources = nvrtc.compile(source, arch, {}).resources
        _assert_no_spills(resources, threads, f"{arch} {source.name}")
        found |= resources
    assert set(found) == {
        *("prune_anchor_sum", "prune_compact", "prune_copy", "prune_select"),
        *("prune_sum_chunks", "prune_pool_means", "prune_mean_heads"),
    }


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_row_has_a_place_in_chunks_that_fit(head_size: int, arch: str) -> None:
    for window, ratio in MODELS:
        shape = score_shape.score_shape(head_size, window, ratio, SHARED[arch])
        sizes = score_shape.tile_bytes, score_shape.means_bytes, score_shape.stats_bytes
        assert max(size(head_size, shape.rows) for size in sizes) + score_shape.STATIC_BYTES <= SHARED[arch]
        rows = [(chunk, row) for chunk in range(shape.chunks) for row in range(shape.rows)]
        places = [place for at in rows if (place := _place(shape, window, ratio, *at))]
        assert sorted(places) == [(head, query) for head in range(ratio) for query in range(window)]


def _place(shape: score_shape.ScoreShape, window: int, ratio: int, chunk: int, row: int) -> tuple[int, int] | None:
    """`Request::place` of observe.cuh: the query head and the query of a row."""
    if shape.parts > 1:
        query = chunk % shape.parts * shape.rows + row
        return (chunk // shape.parts, query) if query < window else None
    head = chunk * shape.heads_per_chunk + row // window
    return (head, row % window) if row // window < shape.heads_per_chunk and head < ratio else None


def test_shapes_of_models_that_are_served_are_these() -> None:
    assert score_shape.score_shape(128, 32, 4, SHARED["sm_90a"]) == score_shape.ScoreShape(128, 4, 1, 1)
    assert score_shape.score_shape(128, 32, 4, SHARED["sm_89"]) == score_shape.ScoreShape(128, 4, 1, 1)
    assert score_shape.score_shape(128, 1, 4, SHARED["sm_90a"]) == score_shape.ScoreShape(32, 4, 1, 1)
    assert score_shape.score_shape(256, 32, 16, SHARED["sm_89"]).rows == 32
