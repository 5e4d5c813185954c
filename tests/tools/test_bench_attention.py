"""`kvcompile bench attention` without a GPU: options, checks and record, with the CPU operators and a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcompile.cli import main
from kvcompile.ops.kv8 import reference
from kvcompile.tools import bench_attention, bench_cuda
from kvcompile.tools.bench_attention import Case
from kvcompile.tools.bench_attention_batch import make_batch
from kvcompile.tools.bench_attention_systems import KVCompile

CPU = torch.device("cpu")
CASES = (Case("decode", 3, 40, 1), Case("decode", 1, 99, 1), Case("prefill", 1, 0, 32))
ARGUMENTS = ["bench", "attention", "--heads", "4", "--kv-heads", "2", "--head-size", "64", "--runs", "3"]


class Pass:
    """Calls each system once, and says that run i took 10 + i microseconds."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        for copy in range(copies):
            call(copy)

    def time(self, runs: int) -> list[float]:
        return [10.0 + i for i in range(runs)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "device", lambda: CPU)
    monkeypatch.setattr(bench_cuda, "copies_of", lambda size: 2)
    monkeypatch.setattr(bench_cuda, "copy_rates", lambda runs: [4000.0 + 100 * i for i in range(runs)])
    monkeypatch.setattr(bench_cuda, "Pass", Pass)
    monkeypatch.setattr(bench_attention, "CASES", CASES)


def test_the_record_has_times_and_rates_of_one_run(
    machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["name"] == "attention"
    rows = {(r["case"], r["system"], r["metric"]): r for r in content["rows"]}
    assert list(rows) == [
        ("decode 3x41", "kvcompile", "time"),
        ("decode 3x41", "kvcompile", "bandwidth"),
        ("decode 1x100", "kvcompile", "time"),
        ("decode 1x100", "kvcompile", "bandwidth"),
        ("copy of 1 GiB", "copy", "bandwidth"),
    ]
    assert rows["decode 3x41", "kvcompile", "time"]["median"] == 11
    # 3 rows of 41 tokens, 2 KV heads, keys and values of 64 bytes and a scale of 4.
    assert rows["decode 3x41", "kvcompile", "bandwidth"]["median"] == round(3 * 41 * 2 * 136 / 11 / 1e3, 4)
    said = capsys.readouterr().out
    assert "fa-bf16: not measured: it needs a CUDA device" in said
    assert "kvcompile: not measured: it needs a CUDA device" in said  # prompts take vLLM's flash attention
    assert "Copy of 1 GiB: 4100 GB/s (4000 to 4200)" in said


def test_the_systems_compute_attention_over_all_tokens(machine: None) -> None:
    batch = make_batch(3, 40, 1, 4, 2, 64, CPU)
    system = KVCompile(batch)
    batch.output.fill_(float("nan"))
    system()
    cache = system._cache
    expected = reference.attention(batch.query, cache, batch.block_table, batch.seq_lens, batch.starts, batch.scale)
    torch.testing.assert_close(batch.output.double(), expected, rtol=0.02, atol=0.01)
    assert not (batch.block_table == 0).any()


def test_rows_of_pruned_requests_are_those_of_shorter_ones_behind_null_blocks(machine: None) -> None:
    assert Case("decode", 3, 40, 1, released=96).name == "decode 3x137 pruned to 41"
    plain, pruned = (make_batch(3, 40, 1, 4, 2, 64, CPU, released) for released in (0, 6))
    for batch in (plain, pruned):
        batch.output.fill_(float("nan"))
        KVCompile(batch)()
    assert torch.equal(plain.output, pruned.output)
    assert pruned.pruned_lens.tolist() == [137] * 3 and not pruned.pruned_table[:, :6].any()
    # The other systems, which know nothing of it, are given what was kept.
    assert torch.equal(plain.block_table, pruned.block_table) and torch.equal(plain.seq_lens, pruned.seq_lens)


def test_a_wrong_result_ends_it(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(KVCompile):
        label = "triton-int8"

        def __call__(self) -> None:
            super().__call__()
            self._batch.output.mul_(1.1)

    monkeypatch.setitem(bench_attention.SYSTEMS, "triton-int8", Wrong)
    monkeypatch.setattr(bench_attention, "CASES", CASES[:1])
    assert main(ARGUMENTS) == 1
    assert "kvcompile bench: decode 3x41: kvcompile is 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "6", "--kv-heads", "4"], "--heads is 6; allowed are multiples of --kv-heads, 4"),
        (["--head-size", "65"], "--head-size is 65; allowed are 64, 80, 96, 128, 256"),
        (["--runs", "0"], "--runs is 0; allowed is 1 or more"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder does not exist"),
        ([], "this benchmark measures GPU kernels and finds no CUDA device"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "attention", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
