"""`kvcompile bench prune` without a GPU: options, checks and record, with the CPU operators and a fake clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.cli import main
from kvcompile.tools import bench_cuda, bench_prefill, bench_prune, model_shapes

ARGUMENTS = ["bench", "prune", "--heads", "4", "--kv-heads", "2", "--head-size", "64", "--layers", "2", "--runs", "3"]


class Pass:
    """Calls each layer once, and says that run i took 10 + i microseconds."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        for copy in range(copies):
            call(copy)

    def time(self, runs: int) -> list[float]:
        return [10.0 + i for i in range(runs)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_cuda, "copy_rates", lambda runs: [4000.0 + 100 * i for i in range(runs)])
    monkeypatch.setattr(bench_cuda, "Pass", Pass)


def test_the_record_has_the_parts_of_every_method_and_budget(
    machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--tokens", "1200", "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["name"] == "prune"
    rows = {(row["case"], row["system"], row["metric"]): row for row in content["rows"]}
    # 1200 tokens of which 600, or 544, and the rest of a block are kept.
    cases = ["andpro 1200->608", "andpro 1200->544", "robust 1200->608", "robust 1200->544"]
    assert list(rows) == [
        *(
            (case, *part)
            for case in cases
            for part in (
                ("kvcompile/score", "time"),
                ("kvcompile/select", "time"),
                ("kvcompile/compact", "time"),
                ("kvcompile", "time"),
                ("kvcompile/compact", "bandwidth"),
            )
        ),
        ("copy of 1 GiB", "copy", "bandwidth"),
    ]
    assert rows[cases[0], "kvcompile/score", "time"]["median"] == 11
    assert rows[cases[0], "kvcompile/compact", "time"]["median"] == 5.5  # of two layers
    # Keys and values of 608 tokens and 2 heads, 68 bytes each, read and written.
    moved = rows[cases[0], "kvcompile/compact", "bandwidth"]["median"]
    assert moved == round(4 * 608 * 2 * 68 / 5.5 / 1e3, 4)
    said = capsys.readouterr().out
    assert "andpro 1200->608" in said and "11.0 (10.0 to 12.0)" in said
    assert "Copy of 1 GiB: 4100 GB/s (4000 to 4200)" in said


class Engine:
    """Takes 1 ms for each 1200 tokens, and 50 ms more for what it has to compile first."""

    stock = True

    def __init__(self, name: str, model: Path, arguments: dict[str, Any], log: Path) -> None:
        self.arguments, self.served = arguments, 0

    def facts(self) -> dict[str, Any]:
        return {"kvcompile": not self.stock}

    def run(self, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
        assert (output, requests) == (1, 1) and prompt < self.arguments["max_model_len"]
        self.served += 1
        return {"ttft": [prompt * 1e-3 / 1200 + (0.05 if self.served <= 2 else 0)]}

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, machine: None) -> None:
    monkeypatch.setattr(bench_prefill, "Served", Engine)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    monkeypatch.setitem(model_shapes.SHAPES, "tiny", shape)


def test_pruning_is_said_as_a_share_of_a_prefill(
    engine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "x.json"
    options = ["--tokens", "1200", "--methods", "andpro", "--prefill", "tiny", "--json", str(record)]
    assert main([*ARGUMENTS, *options]) == 0
    rows = {(row["case"], row["metric"]): row for row in json.loads(record.read_text())["rows"]}
    assert rows["prefill 1200", "ttft"]["median"] == 1000 and rows["prefill 1200", "ttft"]["runs"] == 3
    # Two layers of 5.5 us each, of 1 ms.
    assert rows["andpro 1200->608", "share of prefill"]["median"] == 1.1
    said = capsys.readouterr().out
    assert "prefill 1200, stock vLLM: 1000.00 (1000.00 to 1000.00) us to the first token." in said
    assert "andpro 1200->608: 1.10 (1.00 to 1.20) % of the prefill, all layers." in said


def test_a_prefill_of_another_shape_or_engine_is_refused(
    engine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--tokens", "600", "--prefill", "tiny", "--layers", "3"]) == 2
    assert "--prefill tiny has layers 2, heads 4, kv_heads 2, head_size 64; what is pruned has layers 3, " in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(Engine, "stock", False)
    assert main([*ARGUMENTS, "--tokens", "600", "--prefill", "tiny"]) == 2
    assert "kvcompile is active in the engine, which has to be stock vLLM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "neither a folder with a config.json nor a known shape"),
        ("{", "config.json cannot be read as JSON"),
        ("{}", "--prefill: config.json gives no layers and heads (KeyError('num_attention_heads')); correct it"),
    ],
)
def test_a_model_that_is_none_ends_it_and_leaves_nothing(
    engine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str | None,
    message: str,
) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    if config is not None:
        (model / "config.json").write_text(config)
    assert main([*ARGUMENTS, "--tokens", "600", "--prefill", str(model)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not list(scratch.iterdir())


@pytest.mark.parametrize("part", ["scores", "tokens"])
def test_a_wrong_result_ends_it(
    part: str, machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = {"scores": "prune_score", "tokens": "select"}[part]
    genuine, calls = getattr(bench_prune, name), []

    def first_is_wrong(*args: object) -> torch.Tensor:
        calls.append(args)
        result = genuine(*args)
        return result + (0 if len(calls) > 1 else 1)

    monkeypatch.setattr(bench_prune, name, first_is_wrong)
    assert main([*ARGUMENTS, "--tokens", "600"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile bench: andpro: {'scores are' if part == 'scores' else 'the tokens selected'}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "6", "--kv-heads", "4"], "--heads is 6; allowed are multiples of --kv-heads, 4"),
        (["--head-size", "65"], "--head-size is 65; allowed are 64, 80, 96, 128, 256"),
        (["--layers", "0"], "--layers is 0; allowed is 1 or more"),
        (["--tokens", "9000", "559"], "--tokens has 559; allowed is 560 or more: 544 of them are kept"),
        (["--methods", "critical"], "--methods has critical, which needs a model's output projection"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder does not exist"),
        ([], "this benchmark measures GPU kernels and finds no CUDA device"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "prune", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
