"""`kvcompile bench serve` without an engine: options, turns, record; and its child with a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.cli import main
from kvcompile.config import UsageError
from kvcompile.tools import bench_cuda, bench_serve, model_shapes
from kvcompile.tools.bench_serve import SYSTEMS, Case
from kvcompile.tools.serve_engine import Served

FACTS = {"blocks": 100, "block_size": 16, "backend": None, "graphs": "FULL_AND_PIECEWISE", "asynchronous": True}
ARGUMENTS = ["bench", "serve", "llama-3.2-1b", "--grid", "8:5,16:3", "--requests", "4", "--runs", "2"]


class Fake:
    """An engine that answers at once and notes what it was asked, and when."""

    asked: list[tuple[str, Any]] = []
    facts_of: dict[str, Any] = {}

    def __init__(self, name: str, model: Path, arguments: dict[str, Any], log: Path) -> None:
        self.name, self.arguments = name, arguments
        assert (model / "config.json").is_file() and arguments["load_format"] == "dummy"
        self.asked.append((name, "start"))

    def facts(self) -> dict[str, Any]:
        return {**FACTS, **SYSTEMS[self.name].expected, **self.facts_of}

    def run(self, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
        self.asked.append((self.name, (prompt, output, requests, seed)))
        seconds = 2.0 if self.name == "vllm-bf16" else 1.0
        return {"seconds": seconds, "ttft": [0.1, 0.2, 0.3, 0.4], "tpot": [0.01] * 4, "preemptions": seed}

    def close(self) -> None:
        self.asked.append((self.name, "close"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.asked, Fake.facts_of = [], {}
    monkeypatch.setattr(bench_cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_serve, "Served", Fake)
    return Fake


def test_the_record_has_every_case_and_system(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--json", str(tmp_path / "x.json")]) == 0
    rows = {(r["case"], r["system"], r["metric"]): r for r in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert rows["KV cache", "vllm-bf16", "blocks"]["median"] == 100
    assert (
        rows["8->5", "vllm-bf16", "output_throughput"]["median"] == 10
        and rows["8->5", "kvcompile/kv8", "output_throughput"]["median"] == 20
    )
    assert (
        rows["16->3", "kvcompile/kv8", "ttft_mean"]["median"] == 0.25
        and rows["16->3", "kvcompile/kv8", "ttft_worst"]["median"] == 0.4
    )
    assert (
        rows["16->3", "kvcompile/kv8", "tpot_mean"]["median"] == 10
        and rows["16->3", "kvcompile/kv8", "preemptions"]["max"] == 1
    )
    assert {row["runs"] for (case, *_), row in rows.items() if case != "KV cache"} == {2}
    assert "2.00x" in capsys.readouterr().out


def test_one_by_one_an_engine_is_gone_before_the_next_starts(fake: type[Fake]) -> None:
    assert main(ARGUMENTS) == 0
    kinds = [(name, what) for name, what in fake.asked if isinstance(what, str)]
    assert kinds == [
        ("vllm-bf16", "start"),
        ("vllm-bf16", "close"),
        ("kvcompile/kv8", "start"),
        ("kvcompile/kv8", "close"),
    ]


def test_together_they_take_turns_run_by_run(fake: type[Fake]) -> None:
    assert main([*ARGUMENTS, "--together"]) == 0
    timed = [(name, what) for name, what in fake.asked if not isinstance(what, str) and what[3] < 1000]
    assert [name for name, _ in timed] == ["vllm-bf16", "kvcompile/kv8"] * 4
    assert [what for _, what in timed[:4]] == [(8, 5, 4, 0), (8, 5, 4, 0), (8, 5, 4, 1), (8, 5, 4, 1)]
    assert [what for _, what in fake.asked[:2]] == ["start", "start"]


def test_a_system_that_is_not_what_it_should_be_ends_it(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    fake.facts_of = {"graphs": "NONE"}
    assert main(ARGUMENTS) == 2
    assert "vllm-bf16: graphs is NONE and not FULL_AND_PIECEWISE" in capsys.readouterr().err
    assert fake.asked[-1] == ("vllm-bf16", "close")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "model x: neither a folder with a config.json nor a known shape; shapes are llama-3.1-8b"),
        (["llama-3.1-8b", "--grid", "8"], "--grid is '8'; allowed are PROMPT:OUTPUT pairs"),
        (["llama-3.1-8b", "--grid", "8:0"], "--grid is '8:0'; allowed are PROMPT:OUTPUT pairs"),
        (
            ["llama-3.1-8b", "--systems", "vllm-bf16,x"],
            "--systems has 'x'; allowed are vllm-bf16, vllm-int8, kvcompile/kv8, kvcompile",
        ),
        (["llama-3.1-8b", "--runs", "0"], "--runs is 0; allowed is 1 or more"),
        (["llama-3.1-8b", "--kv-gib", "0"], "--kv-gib is 0.0; allowed is more than 0"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not fake.asked


def test_cases_are_read_and_named() -> None:
    assert [str(case) for case in bench_serve.grid("512:128,4096:512")] == ["512->128", "4096->512"]
    assert bench_serve.grid(bench_serve.GRID)[-1] == Case(16000, 2048)


def test_a_folder_with_a_checkpoint_is_taken_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    assert model_shapes.folder_of(str(tiny_llama), tmp_path) == tiny_llama
    config = json.loads((model_shapes.folder_of("llama-3.1-8b", tmp_path) / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (4096, 32, 128256)


@pytest.mark.timeout(600)
def test_the_child_serves_what_it_is_asked_for_and_a_broken_one_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
    engine = Served("vllm-bf16", tiny_llama, {**arguments, "max_num_seqs": 4}, tmp_path / "log")
    broken = Served("kvcompile/kv8", tiny_llama, {**arguments, "max_num_seqs": 0}, tmp_path / "broken.log")
    try:
        assert engine.facts()["blocks"] > 0
        run = engine.run(20, 6, 3, seed=1)
        assert len(run["ttft"]) == len(run["tpot"]) == 3 and run["preemptions"] == 0
        assert 0 < max(run["ttft"]) <= run["seconds"]
        with pytest.raises(UsageError, match=r"^kvcompile/kv8: the engine ended: .*Error.*; its log is .*broken.log$"):
            broken.facts()
    finally:
        engine.close()
        broken.close()
