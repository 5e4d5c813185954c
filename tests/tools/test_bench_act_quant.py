"""`kvcompile bench act-quant` without a GPU: options, checks and record, with the CPU operators and a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcompile.cli import main
from kvcompile.tools import bench_act_quant, bench_cuda
from kvcompile.tools.bench_w4a8_systems import Unavailable

ARGUMENTS = ["bench", "act-quant", "--hidden", "64", "--intermediate", "128", "--tokens", "3", "40", "--runs", "3"]


class Pass:
    """Calls each operand once, and says that run i took 10 + i microseconds."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        for copy in range(copies):
            call(copy)

    def time(self, runs: int) -> list[float]:
        return [10.0 + i for i in range(runs)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise Unavailable("no extension")

    monkeypatch.setattr(bench_cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_cuda, "l2_bytes", lambda: 20_000)
    monkeypatch.setattr(bench_cuda, "copies_of", lambda size: 5)
    monkeypatch.setattr(bench_cuda, "Pass", Pass)
    monkeypatch.setattr(bench_act_quant, "load_cutlass", missing)


def test_the_record_has_every_operator_and_system_of_one_run(
    machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["name"] == "act_quant"
    assert [(row["case"], row["system"]) for row in content["rows"]] == [
        (f"T={tokens} {name}", system)
        for tokens in (3, 40)
        for name in ("quant_per_token", "rms_norm_quant", "fused_add_rms_norm_quant", "silu_mul_quant")
        for system in ("kvcompile", "copy")
    ]
    assert {(row["metric"], row["unit"], row["median"], row["runs"]) for row in content["rows"]} == {
        ("time", "us", 11, 3)
    }
    assert "vllm-bf16: not measured: no extension" in capsys.readouterr().out


def test_a_wrong_result_ends_it(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    genuine, calls = bench_act_quant.OPERATORS["rms_norm_quant"], []

    def second_is_wrong(x: tuple, w: torch.Tensor) -> tuple:
        calls.append(x)
        x_q, scale = genuine.ours(x, w)
        return (x_q if len(calls) == 1 else x_q ^ 1), scale

    monkeypatch.setitem(bench_act_quant.OPERATORS, "rms_norm_quant", genuine._replace(ours=second_is_wrong))
    assert main(ARGUMENTS) == 1
    assert "rms_norm_quant: 192 of 192 elements differ, by up to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "12"], "--hidden is 12; allowed are multiples of 8"),
        (["--intermediate", "0"], "--intermediate is 0"),
        (["--tokens", "4", "0"], "--tokens has 0; allowed is 1 or more"),
        (["--runs", "0"], "--runs has 0"),
        (["--json", "no/x.json"], "the folder does not exist"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "act-quant", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_few_tokens_stay_in_the_cache_and_many_do_not(machine: None) -> None:
    assert bench_act_quant._copies([(8, 64)]) == 2
    assert bench_act_quant._copies([(64, 64)]) == 5
