"""Choosing between the fused kernel and the rebuilt weight: measured tables, the estimate, and what fits a GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.w4a8 import estimate, fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.limits import Limits
from tests.ops.w4a8.gpus import A100, GPUS, H200, LLAMA_8B, RTX_3090

ODD = ((576, 576, 9), (1, 64, 1), (33, 4304, 1), (16, 16, 1), (1001, 192, 3), (49152, 65536, 512), (128256, 4096, 32))
TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 200, 255, 256, 257, 512, 1000, 1024, 4096, 70000)
SMALL, LARGE = Tiling(1, 8, 4, 1, 1), Tiling(1, 16, 3, 1, 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a folder of shipped tables of this test's own, both empty; returns the latter."""
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(table, "SHIPPED", shipped)
    table._shapes.cache_clear()
    table.choose.cache_clear()
    yield shipped
    table._shapes.cache_clear()
    table.choose.cache_clear()


def _entry(tokens: int, tiling: Tiling | None) -> dict[str, Any]:
    return {"tokens": tokens, "tiling": tiling and tiling._asdict(), "us": 1.5}


def _shape(rows: int, columns: int, *entries: dict[str, Any], groups: int | None = None) -> dict[str, Any]:
    sizes = {"rows": rows, "columns": columns} | ({} if groups is None else {"groups": groups})
    return sizes | {"entries": list(entries)}


def _write(path: Path, *shapes: dict[str, Any], **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": 1, "gpu": "any", "date": "2026-01-01", "versions": {}, "shapes": list(shapes)}
    path.write_text(json.dumps(content | changes))


def test_a_name_of_a_gpu_becomes_that_of_a_file() -> None:
    assert table.slug("NVIDIA H200") == "nvidia-h200"
    assert table.slug("NVIDIA GeForce RTX 4070 Ti/(x)") == "nvidia-geforce-rtx-4070-ti-x"


def test_an_entry_holds_up_to_its_number_of_tokens(folder: Path) -> None:
    _write(folder / "nvidia-h200.json", _shape(4096, 4096, _entry(32, LARGE), _entry(1, SMALL), _entry(64, None)))
    chosen = {tokens: table.choose(H200, tokens, 4096, 4096, 32) for tokens in (1, 2, 32, 33, 64, 65, 5000)}
    assert chosen == {1: SMALL, 2: LARGE, 32: LARGE, 33: None, 64: None, 65: None, 5000: None}


def test_below_a_first_entry_that_is_a_rebuild_the_estimate_decides(folder: Path) -> None:
    """Tuning for many tokens alone must not make decode rebuild its weights."""
    _write(folder / "nvidia-h200.json", _shape(4096, 4096, _entry(256, None)))
    assert table.choose(H200, 1, 4096, 4096, 32) == estimate.choose(H200, 1, 4096, 4096, 32) is not None
    assert table.choose(H200, 256, 4096, 4096, 32) is None


@pytest.mark.parametrize("sizes", [(576, 576, 9), (768, 4096, 32), (1, 64, 1), (128256, 16384, 128)])
def test_a_weight_of_quite_another_size_is_left_to_the_estimate(folder: Path, sizes: tuple[int, int, int]) -> None:
    _write(folder / "nvidia-h200.json", _shape(4096, 4096, _entry(8, SMALL), _entry(128, None)))
    assert table.choose(H200, 100, 2048, 2048, 32) is None
    for tokens in (1, 100, 128):
        assert table.choose(H200, tokens, *sizes) == estimate.choose(H200, tokens, *sizes)


def test_beyond_a_last_entry_that_is_fused_the_estimate_decides(folder: Path) -> None:
    _write(folder / "nvidia-h200.json", _shape(4096, 4096, _entry(8, SMALL)))
    assert table.choose(H200, 8, 4096, 4096, 32) == SMALL
    assert table.choose(H200, 9, 4096, 4096, 32) == estimate.choose(H200, 9, 4096, 4096, 32) != SMALL
    assert table.choose(H200, 5000, 4096, 4096, 32) is None


def test_a_shape_that_was_not_measured_is_taken_for_the_nearest_by_ratio(folder: Path) -> None:
    shapes = _shape(1000, 1024, _entry(8, SMALL)), _shape(16000, 1024, _entry(8, LARGE))
    _write(folder / "nvidia-h200.json", *shapes)
    # The geometric mean of 1000 and 16000 is 4000; by difference, 8000 would be nearer to 1000.
    assert table.choose(H200, 4, 3900, 1024, 8) == SMALL
    assert table.choose(H200, 4, 4100, 1024, 8) == LARGE
    assert table.choose(H200, 4, 8000, 2048, 8) == LARGE


def test_of_equal_sizes_the_one_with_the_same_groups_wins(folder: Path) -> None:
    shapes = _shape(64, 1024, _entry(8, LARGE), groups=1), _shape(64, 1024, _entry(8, SMALL), groups=8)
    _write(folder / "nvidia-h200.json", *shapes)
    assert table.choose(H200, 4, 64, 1024, 8) == SMALL
    assert table.choose(H200, 4, 64, 1024, 1) == LARGE


def test_a_tiling_that_does_not_fit_gives_way_to_the_estimate(folder: Path) -> None:
    clusters = Tiling(1, 8, 4, 2, 1)
    _write(folder / "nvidia-a100-sxm4-80gb.json", _shape(4096, 4096, _entry(8, clusters)))
    assert A100.plan(4, 4096, 4096, 32, clusters) is None
    assert table.choose(A100, 4, 4096, 4096, 32) == estimate.choose(A100, 4, 4096, 4096, 32)
    too_large = Tiling(2, 16, 8, 1, 1)
    _write(folder / f"{table.slug(RTX_3090.name)}.json", _shape(4096, 4096, _entry(8, too_large)))
    assert RTX_3090.plan(4, 4096, 4096, 32, too_large) is None
    assert RTX_3090.plan(4, 4096, 4096, 32, table.choose(RTX_3090, 4, 4096, 4096, 32))


def test_what_the_user_measured_is_added_to_what_was_shipped_for_the_same_shape(folder: Path) -> None:
    _write(folder / "nvidia-h200.json", _shape(4096, 4096, _entry(1, SMALL), _entry(32, SMALL), _entry(64, None)))
    _write(table.user_path("NVIDIA H200"), _shape(4096, 4096, _entry(32, LARGE)))
    assert [table.choose(H200, n, 4096, 4096, 32) for n in (1, 32, 64)] == [SMALL, LARGE, None]


def test_the_users_table_wins_shape_by_shape(folder: Path) -> None:
    _write(folder / "nvidia-h200.json", _shape(64, 1024, _entry(8, SMALL)), _shape(4096, 1024, _entry(8, SMALL)))
    _write(table.user_path("NVIDIA H200"), _shape(64, 1024, _entry(8, None)))
    assert table.choose(H200, 8, 64, 1024, 8) is None
    assert table.choose(H200, 8, 4096, 1024, 8) == SMALL


def test_the_users_table_lies_beside_the_kernel_cache() -> None:
    assert table.user_path("NVIDIA H200") == nvrtc.cache_dir().parent / "tables" / "nvidia-h200.json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"format"',
        "{}",
        '{"format": 2, "shapes": []}',
        '{"format": 1}',
        '{"format": 1, "shapes": [{"rows": 1}]}',
        '{"format": 1, "shapes": [{"rows": 64, "columns": 64, "entries": []}]}',
        '{"format": 1, "shapes": [{"rows": 64, "columns": 64, "entries": [{"tokens": 1, "tiling": {}, "us": 1}]}]}',
        '{"format": 1, "shapes": [{"rows": 64, "columns": 64, "entries": [{"tokens": 0, "tiling": null, "us": 1}]}]}',
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(1, 0, 4, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(1, 8.5, 4, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(0, 64, _entry(1, None))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(3, 8, 4, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(4, 6, 4, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(1, 8, 1, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(1, 8, 4, 3, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, _entry(1, Tiling(1, 1, 4, 1, 1)))]}),
        json.dumps({"format": 1, "shapes": [_shape(64, 64, {"tokens": 1, "tiling": {"a_field": 1}, "us": 1})]}),
    ],
)
def test_a_users_table_that_cannot_be_used_costs_one_warning_that_says_what_to_do(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = table.user_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    _write(folder / "nvidia-h200.json", _shape(64, 1024, _entry(8, SMALL)))
    with caplog.at_level(logging.WARNING):
        for tokens in (1, 2, 3):
            assert table.choose(H200, tokens, 64, 1024, 8) == SMALL
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(path) in message and "kvcompile bench w4a8 --tune" in message


def test_a_users_table_that_cannot_be_read_costs_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    table.user_path("NVIDIA H200").mkdir(parents=True)
    assert table.choose(H200, 1, 64, 1024, 8) is not None
    assert len(caplog.records) == 1


def test_every_shipped_table_is_sound_and_all_it_chooses_fits() -> None:
    shipped = sorted(Path(table.__file__).with_name("tables").glob("*.json"))
    assert "nvidia-h200.json" in [path.name for path in shipped]
    for path in shipped:
        content = json.loads(path.read_text())
        assert path.stem == table.slug(content["gpu"])
        for shape, entries in table.parse(path.read_text()).items():
            for entry in entries:
                limits = next(gpu for gpu in GPUS if gpu.name == content["gpu"])
                sizes = entry.tokens, shape.rows, shape.columns, shape.groups
                assert entry.tiling is None or limits.plan(*sizes, entry.tiling), (shape, entry)
                assert entry.us > 0


@pytest.mark.parametrize("limits", GPUS, ids=lambda gpu: gpu.name)
def test_a_gpu_without_a_table_gets_what_fits_and_never_goes_back_from_rebuilt_to_fused(limits: Limits) -> None:
    for shape in (*LLAMA_8B, *ODD):
        chosen = [table.choose(limits, tokens, *shape) for tokens in TOKENS]
        for tokens, tiling in zip(TOKENS, chosen, strict=True):
            assert tiling is None or limits.plan(tokens, *shape, tiling), (shape, tokens)
        fused_at = [tiling is not None for tiling in chosen]
        assert fused_at == sorted(fused_at, reverse=True), shape
        assert fused_at[0] and not fused_at[-1], shape


def test_the_kernels_of_a_weight_are_those_of_every_number_of_tokens(folder: Path) -> None:
    found = table.kernels(RTX_3090, 8192, 28672, 224)
    # 9 to 15 tokens leave room in shared memory for what 16 do not: a kernel that no round number asks for.
    twelve, sixteen = (table.choose(RTX_3090, tokens, 8192, 28672, 224) for tokens in (12, 16))
    assert twelve is not None and (twelve, 2) in found and twelve != sixteen
    assert table.kernels(H200, 4096, 4096, 32) >= {
        (tiling, fused.token_tiles(tokens, wgmma=tiling.wgmma))
        for tokens in (1, 5, 40, 100)
        if (tiling := table.choose(H200, tokens, 4096, 4096, 32))
    }


def test_candidates_are_many_and_each_fits_registers_warps_and_the_gpu() -> None:
    for limits in GPUS:
        for tokens in (1, 8, 32, 64, 512):
            found = table.candidates(limits, tokens)
            assert len(set(found)) == len(found) >= 7
            assert all(t.warps * t.blocks <= 32 for t in found)
            assert all(limits.has(t) for t in found)
    assert {t.split for t in table.candidates(A100, 1)} == {1}
    assert {t.split for t in table.candidates(H200, 1)} == {1, 2}
    assert any(t.wgmma for t in table.candidates(H200, 32))
    assert not any(t.wgmma for gpu in GPUS if gpu.capability != (9, 0) for t in table.candidates(gpu, 32))
