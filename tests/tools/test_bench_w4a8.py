"""`kvcompile bench w4a8` without a GPU: options, checks, table and record, with the CPU operator and a fake clock."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.ops.w4a8.gpus import H200

from kvcompile.cli import main
from kvcompile.ops.w4a8 import cuda, unpack
from kvcompile.ops.w4a8.reference import W4A8Weight, rebuild
from kvcompile.tools import bench_cuda, bench_w4a8
from kvcompile.tools import bench_w4a8_systems as systems
from kvcompile.tools.bench_w4a8_systems import SYSTEMS, Unavailable

CPU = torch.device("cpu")
ARGUMENTS = ["bench", "w4a8", "--shapes", "48x128,80x192", "--tokens", "33,2", "--runs", "3"]


class Pass:
    """Calls once, and says that run i took 10 + i microseconds."""

    made: list[int] = []

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        for copy in range(copies):
            call(copy)
        self.made.append(copies)

    def time(self, runs: int) -> list[float]:
        return [10.0 + i for i in range(runs)]


def sums(x_q: Any, x_scale: Any, tiles: Any, params: Any, scales: Any, bias: Any, dtype: Any, tiling: Any) -> Any:
    """The fused kernel's sums, by the reference."""
    rows, columns = scales.shape[0], x_q.shape[1]
    weight = W4A8Weight(*unpack(tiles, params, rows, columns), scales)
    return x_q.int() @ rebuild(weight).int().t()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that passes for an H200 without vLLM's extension and without humming-kernels."""

    def no_cutlass() -> None:
        raise Unavailable("no extension")

    Pass.made = []
    monkeypatch.setattr(bench_cuda, "device", lambda: CPU)
    monkeypatch.setattr(bench_cuda, "copies_of", lambda size: 3)
    monkeypatch.setattr(bench_cuda, "copy_rates", lambda runs: [4000.0 + 100 * i for i in range(runs)])
    monkeypatch.setattr(bench_cuda, "Pass", Pass)
    monkeypatch.setattr(systems, "load_cutlass", no_cutlass)
    monkeypatch.setattr(cuda, "limits", lambda device: H200)
    monkeypatch.setattr(cuda, "fused_linear", sums)


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for option in ([], ["--tune"]):
        assert main(["bench", "w4a8", *option]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvcompile: error: ") and "no CUDA device" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4096"], "--shapes has '4096'; allowed is llama-8b, or output by input channels such as"),
        (["--shapes", "0x64"], "--shapes has '0x64'"),
        (["--shapes", "64x40"], "--shapes has '64x40'; .* a multiple of 16"),
        (["--tokens", "1,x"], "--tokens is '1,x'; allowed are whole numbers above 0"),
        (["--tokens", "0"], "--tokens is '0'"),
        (["--runs", "0"], "--runs is 0; allowed is 1 or more"),
        (["--systems", "kvcompile,other"], "--systems has 'other'; allowed are kvcompile, cublas-bf16, "),
        (["--plot", "x.png"], "--plot x.png: it draws SVG alone"),
        (["--plot", "no/x.svg"], "--plot no/x.svg: the folder does not exist"),
        (["--json", "no/x.json"], "--json no/x.json: the folder does not exist"),
        (["--output", "x.json"], "--output belongs to --tune"),
        (["--tune-seconds", "5"], "--tune-seconds belongs to --tune"),
        (["--tune", "--json", "x.json"], "--json belongs to a comparison"),
        (["--tune", "--plot", "x.svg"], "--plot belongs to a comparison"),
        (["--tune", "--tune-seconds", "0"], "--tune-seconds is 0; allowed is a number above 0"),
        (["--tune", "--tune-seconds", "nan"], "--tune-seconds is nan"),
        (["--tune", "--output", "no/x.json"], "--output no/x.json: the folder does not exist"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "w4a8", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_the_record_has_every_case_system_and_sum_of_one_run(
    machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, plot = tmp_path / "w4a8.json", tmp_path / "w4a8.svg"
    assert main([*ARGUMENTS, "--json", str(target), "--plot", str(plot)]) == 0
    content = json.loads(target.read_text())
    assert content["name"] == "w4a8" and content["versions"]["humming-kernels"] is None
    measured = {(row["case"], row["system"]): row for row in content["rows"]}
    assert set(measured) == {("copy of 1 GiB", "copy")} | {
        (f"M={tokens} {shape}", system)
        for tokens in (2, 33)
        for shape in ("48x128", "80x192", "layer_sum")
        for system in ("kvcompile", "cublas-bf16", "floor")
    }
    assert all(row["runs"] == 3 for row in content["rows"])
    one, both = measured["M=2 48x128", "kvcompile"], measured["M=2 layer_sum", "kvcompile"]
    assert [one[part] for part in ("metric", "unit", "min", "median", "max")] == ["time", "us", 10, 11, 12]
    assert [both[part] for part in ("min", "median", "max")] == [20, 22, 24]
    # Each weight was rotated: two shapes, two systems, two numbers of tokens.
    assert Pass.made == [3] * 8
    ElementTree.parse(plot)
    out = capsys.readouterr().out
    assert "cutlass-int8: not measured: no extension" in out
    assert "humming-w4a8: not measured: humming-kernels is not installed" in out


def test_the_floor_is_the_packed_weight_at_copy_speed_or_the_product_at_the_int8_rate() -> None:
    # 28672 x 4096: half a byte each, and two bytes for each of 32 groups, at 4200 GB/s.
    read = (28672 * 4096 / 2 + 28672 * 32 * 2) / 4200e9 * 1e6
    assert bench_w4a8.floor(1, 28672, 4096, 4200, H200) == pytest.approx(read)
    assert read == pytest.approx(14.4, abs=0.1)
    product = 2 * 4096 * 28672 * 4096 / (8192 * 132 * 1.98e9) * 1e6
    assert bench_w4a8.floor(4096, 28672, 4096, 4200, H200) == pytest.approx(product)


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_a_wrong_result_ends_it_before_anything_is_timed(
    machine: None, factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    genuine = SYSTEMS["kvcompile"].prepare

    def wrong(weight: W4A8Weight, copies: int) -> systems.Call:
        call = genuine(weight, copies)
        return lambda copy, a: call(copy, a) * factor

    monkeypatch.setitem(SYSTEMS, "kvcompile", SYSTEMS["kvcompile"]._replace(prepare=wrong))
    assert main(ARGUMENTS) == 1
    assert Pass.made == []
    assert "kvcompile at 2 tokens, 48 x 128" in capsys.readouterr().err


def test_one_sum_that_is_off_by_one_is_a_wrong_result(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(*arguments: Any) -> torch.Tensor:
        found = sums(*arguments)
        found[-1, -1] += 1
        return found

    monkeypatch.setattr(cuda, "fused_linear", off)
    assert main(ARGUMENTS) == 1
    assert "differ from the exact ones" in capsys.readouterr().err


def test_a_library_that_fails_is_left_out_with_its_reason(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(weight: W4A8Weight, copies: int) -> systems.Call:
        raise TypeError("unexpected keyword\nmore")

    monkeypatch.setitem(SYSTEMS, "humming-w4a8", SYSTEMS["humming-w4a8"]._replace(prepare=fails))
    assert main(ARGUMENTS) == 0
    assert "humming-w4a8: not measured: TypeError: unexpected keyword\n" in capsys.readouterr().out


def test_an_error_of_our_own_is_not_swallowed(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(weight: W4A8Weight, copies: int) -> systems.Call:
        raise TypeError("ours")

    monkeypatch.setitem(SYSTEMS, "kvcompile", SYSTEMS["kvcompile"]._replace(prepare=fails))
    with pytest.raises(TypeError, match="ours"):
        main(ARGUMENTS)


def test_systems_that_are_not_asked_for_are_not_measured(machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--systems", "kvcompile"]) == 0
    assert Pass.made == [3] * 4
    assert "cublas" not in capsys.readouterr().out


def test_many_tokens_are_checked_at_both_ends() -> None:
    a = systems.make_activations(300, 64, CPU)
    ends = systems._ends(a)
    assert ends.x_q.shape[0] == ends.x_scale.shape[0] == 128
    assert torch.equal(ends.x_q[0], a.x_q[0]) and torch.equal(ends.x_q[-1], a.x_q[-1])


def test_the_presets_are_the_layers_of_llama_3_1_8b() -> None:
    hidden, intermediate, heads, kv_heads, size = 4096, 14336, 32, 8, 128
    assert bench_w4a8.PRESETS["llama-8b"] == {
        "qkv": ((heads + 2 * kv_heads) * size, hidden),
        "o": (hidden, heads * size),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
