"""`kvcompile bench w4a8 --tune` without a GPU: what is measured, what is chosen, and the table that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.w4a8.gpus import A100

from kvcompile.cli import main
from kvcompile.ops import launch, nvrtc, w4a8
from kvcompile.ops.w4a8 import cuda, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.tools import bench_cuda, bench_w4a8_tune, record
from kvcompile.tools import bench_w4a8_systems as systems

CPU = torch.device("cpu")
# Three blocks, since with one and two the kernel is the same.
BEST, SPILLING, REFUSED = Tiling(1, 8, 5, 1, 1), Tiling(1, 8, 4, 1, 3), Tiling(1, 8, 8, 1, 1)
# Microseconds, whatever the shape: the spilling and the refused would be fastest.
TIMES = {SPILLING: 1.0, REFUSED: 2.0, BEST: 10.0}
OTHERS_US = 20.0
REBUILT_US = {1: 30.0, 64: 5.0}


class Bench:
    """A GPU on which each tiling takes the time above."""

    def __init__(self) -> None:
        self.now: tuple[int, Tiling | None] = (0, None)
        self.measured: list[tuple[int, Tiling | None]] = []

    def fused_linear(self, x_q: Any, x_scale: Any, tiles: Any, params: Any, scales: Any, *rest: Any) -> torch.Tensor:
        *_, dtype, tiling = rest
        self.now = x_q.shape[0], tiling
        if tiling == REFUSED:
            raise RuntimeError("launch failed: 701")
        return w4a8.w4a8_linear(x_q, x_scale, tiles, params, scales, None, dtype)

    def rebuilt_linear(self, x_q: Any, *rest: Any) -> torch.Tensor:
        self.now = x_q.shape[0], None
        return w4a8.w4a8_linear(x_q, *rest)

    def make_pass(self, call: Callable[[int], object], copies: int) -> Bench:
        call(copies - 1)
        self.measured.append(self.now)
        return self

    def quick(self) -> float:
        return self.time(1)[0]

    def time(self, runs: int) -> list[float]:
        tokens, tiling = self.measured[-1]
        return [REBUILT_US[tokens] if tiling is None else TIMES.get(tiling, OTHERS_US)] * runs


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench()
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_cuda, "device", lambda: CPU)
    monkeypatch.setattr(bench_cuda, "copies_of", lambda size: 3)
    monkeypatch.setattr(bench_cuda, "Pass", bench.make_pass)
    monkeypatch.setattr(systems, "load_cutlass", lambda: None)
    monkeypatch.setattr(cuda, "limits", lambda device: A100)
    monkeypatch.setattr(cuda, "fused_linear", bench.fused_linear)
    monkeypatch.setattr(cuda, "rebuilt_linear", bench.rebuilt_linear)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_80")

    def compile_all(cells: Any, arch: str, console: Any) -> dict[Any, bool]:
        assert arch == "sm_80"
        kernel_of = bench_w4a8_tune.kernel_of
        spilling = {kernel_of(SPILLING, *cell) for cell in cells}
        return {
            kernel_of(t, *cell): kernel_of(t, *cell) not in spilling for cell, found in cells.items() for t in found
        }

    monkeypatch.setattr(bench_w4a8_tune, "compile_all", compile_all)
    table._shapes.cache_clear()
    table.choose.cache_clear()
    yield bench
    table._shapes.cache_clear()
    table.choose.cache_clear()


def _tune(*options: str, shapes: str = "48x256", tokens: str = "1,64") -> int:
    return main(["bench", "w4a8", "--tune", "--shapes", shapes, "--tokens", tokens, *options])


def test_the_fastest_sound_tiling_or_the_rebuilt_weight_goes_into_the_users_table(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _tune() == 0
    path = table.user_path(A100.name)
    shapes = table.parse(path.read_text())
    assert shapes == {(48, 256, 2): ((1, BEST, 10.0), (64, None, 5.0))}
    content = json.loads(path.read_text())
    assert content["gpu"] == A100.name and content["versions"] == record.versions()
    out = capsys.readouterr().out
    assert "M=1 48x256: 10.00 us, row_tiles=1 warps=8 stages=5 split=1 blocks=1 (rebuilt 30.00 us)" in out
    assert "M=64 48x256: 5.00 us, rebuilt weight" in out
    assert "1 tilings refused" in out and "launch failed: 701" in out
    assert str(path) in out.replace("\n", "")


def test_what_was_tuned_is_chosen_from_then_on(bench: Bench) -> None:
    _tune()
    assert table.choose(A100, 1, 48, 256, 2) == BEST
    assert table.choose(A100, 64, 48, 256, 2) is None


def test_every_candidate_that_fits_is_measured_and_only_the_best_twice(bench: Bench) -> None:
    _tune(tokens="1")
    fits = set(bench_w4a8_tune.candidates(A100, 1, 48, 256, 2)) - {SPILLING, REFUSED}
    measured = [tiling for _, tiling in bench.measured if tiling]
    assert set(measured) == fits and len(fits) > 20
    assert [tiling for tiling in fits if measured.count(tiling) == 2] == [BEST]


def test_shapes_that_are_not_measured_again_stay_in_the_table(bench: Bench) -> None:
    _tune(tokens="1")
    _tune(shapes="64x128,32x128", tokens="1")
    assert set(table.parse(table.user_path(A100.name).read_text())) == {(48, 256, 2), (64, 128, 1), (32, 128, 1)}
    assert [path.name for path in table.user_path(A100.name).parent.iterdir()] == [f"{table.slug(A100.name)}.json"]


def test_a_damaged_table_is_replaced(bench: Bench) -> None:
    path = table.user_path(A100.name)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "shapes": [{')
    assert _tune(tokens="1") == 0
    assert set(table.parse(path.read_text())) == {(48, 256, 2)}


def test_the_table_goes_where_it_is_asked_to(bench: Bench, tmp_path: Path) -> None:
    assert _tune("--output", str(tmp_path / "mine.json"), tokens="1") == 0
    assert table.parse((tmp_path / "mine.json").read_text())
    assert not table.user_path(A100.name).exists()


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert _tune() == 2
    assert "cannot be written (Not a directory): name another place with --output" in capsys.readouterr().err
    assert not bench.measured


def test_when_the_time_is_over_what_was_measured_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 100.0, 200.0])
    monkeypatch.setattr(bench_w4a8_tune.time, "monotonic", lambda: next(clock))
    assert _tune("--tune-seconds", "50") == 0
    (entries,) = table.parse(table.user_path(A100.name).read_text()).values()
    assert [entry.tokens for entry in entries] == [1]
    assert "The 50 s are over" in capsys.readouterr().out


def test_a_kernel_that_computes_something_else_ends_it_and_leaves_no_table(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return bench.fused_linear(*arguments) * 1.01

    monkeypatch.setattr(cuda, "fused_linear", wrong)
    assert _tune() == 1
    assert "a wrong result" in capsys.readouterr().err
    assert not table.user_path(A100.name).exists()


def test_kernels_are_compiled_beforehand_each_once_and_spilling_ones_are_told_apart() -> None:
    tight, roomy = Tiling(2, 16, 3, 1, 2), Tiling(1, 8, 4, 1, 1)
    cells = {(1, 48, 256, 2): [roomy], (8, 48, 256, 2): [roomy], (64, 48, 256, 2): [tight, roomy]}
    sound = bench_w4a8_tune.compile_all(cells, "sm_80", bench_w4a8_tune.Console(quiet=True))
    asked = [(1, roomy), (64, roomy), (64, tight)]
    found = {(tokens, t): sound[bench_w4a8_tune.kernel_of(t, tokens, 48, 256, 2)] for tokens, t in asked}
    assert found == {(1, roomy): True, (64, roomy): True, (64, tight): False}
    assert len(sound) == 3  # 1 and 8 tokens share one
    source, defines = bench_w4a8_tune.kernel_of(roomy, 64, 48, 256, 2)
    assert (source, dict(defines)["NT"]) == (cuda.SOURCES[False], 8)
    assert nvrtc.compile(source, "sm_80", dict(defines)).resources
