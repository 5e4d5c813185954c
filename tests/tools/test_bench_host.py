"""`kvcompile bench host`: its arguments, and its record where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcompile.cli import main
from kvcompile.tools import bench_host, record


def test_without_a_gpu_the_record_has_both_schedulers_parts_of_a_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench_host, "_STEPS", 60)
    assert main(["bench", "host", "--batch", "2", "--runs", "2", "--json", str(tmp_path / "host.json")]) == 0
    written = json.loads((tmp_path / "host.json").read_text())
    assert written["name"] == "host"
    parts = [(row["case"], row["system"], row["metric"], row["runs"]) for row in written["rows"]]
    assert parts == [
        ("decode 2", system, metric, 2)
        for system in ("vllm-fcfs", "kvcompile")
        for metric in ("schedule_time", "update_time")
    ]
    assert all(row["unit"] == "us" and 0 < row["min"] <= row["median"] <= row["max"] for row in written["rows"])


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--runs", "0"], ["--system", "vllm-v1"]])
def test_a_wrong_argument_is_one_line_that_names_it(arguments: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr(record, "gpu", lambda: None)
    assert main(["bench", "host", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert arguments[0] in line


def test_each_engine_of_a_gpu_gets_its_runner_and_the_same_model_and_pool(monkeypatch, tmp_path: Path, capsys) -> None:
    started, stuck = {}, ""

    class Engine:
        def __init__(self, name, model, arguments, log) -> None:
            assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 1
            log.touch(exist_ok=False)
            started[name] = (bench_host.os.environ["VLLM_USE_V2_MODEL_RUNNER"], arguments)
            self.ours = "compilation_config" in arguments
            self.runner = {"0": "V1", "1": "V2"}[started[name][0]]

        def facts(self) -> dict[str, bool | str]:
            return {"asynchronous": True, "kvcompile": self.ours, "runner": stuck or self.runner}

        def run(self, prompt: int, output: int, requests: int, seed: int) -> dict[str, list[float]]:
            return {"tpot": [1e-3 * (requests + seed)] * requests}

        def close(self) -> None: ...

    monkeypatch.setattr(bench_host, "Served", Engine)
    monkeypatch.setattr(bench_host, "_scheduler_rows", lambda *_: [])
    monkeypatch.setattr(record, "gpu", lambda: "H200")
    target = tmp_path / "x.json"
    asked = ["--system", *" --system ".join([*bench_host._ENGINES, "vllm-v1"]).split()]  # one of them twice
    batches = ["--batch", "1", "--batch", "32", "--batch", "1"]
    assert main(["bench", "host", *asked, *batches, "--runs", "3", "--json", str(target)]) == 0
    runners = {"vllm-v1": "0", "vllm-v2": "1", "kvcompile": "0", "kvcompile/v2": "1"}
    assert {name: runner for name, (runner, _) in started.items()} == runners
    stock, _, ours, _ = (arguments for _, arguments in started.values())
    assert {**stock, "compilation_config": "kvcompile"} == ours
    rows = json.loads(target.read_text())["rows"]
    assert [(row["case"], row["median"]) for row in rows[4:]] == [("decode 32", 34.0)] * 4  # the first run warms up
    assert len(rows) == 8 and all(row["runs"] == 3 for row in rows)
    stuck = "V1"  # whatever is asked for
    assert main(["bench", "host", "--system", "vllm-v2", "--runs", "3"]) == 2
    assert "vllm-v2: the engine is {" in capsys.readouterr().err
