"""`kvcompile bench schedule`: its arguments, its figures, its record and its drawing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcompile.cli import main
from kvcompile.schedule.trace import Arrival
from kvcompile.tools import bench_schedule_plot, engine_process, record, schedule_engine, schedule_overhead
from kvcompile.tools.schedule_metrics import METRICS, measures, percentile

ALIKE = "arrival_s,prompt_tokens,output_tokens\n" + "0,100,60\n" * 40
SYSTEMS = ["vllm-fcfs", "vllm-least-computed", "kvcompile"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "alike.csv"
    path.write_text(ALIKE)
    return str(path)


def _life(arrives: float, first: float, end: float, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(arrival=Arrival(arrives, 10, tokens, tokens), first_token_s=first, end_s=end, tokens=tokens)


def test_the_figures_are_those_of_the_lives() -> None:
    lives = [_life(0.0, 1.0, 3.0, 11), _life(1.0, 4.0, 10.0, 21), _life(2.0, 2.5, 2.5, 1)]
    outcome = SimpleNamespace(
        lives=lives,
        preemptions=4,
        recomputed_tokens=50,
        seconds=10.0,
        usable_blocks=20,
        most_passed=2,
        blocks_used=[(4.0, 10), (10.0, 20)],
    )
    assert measures(outcome) == {
        "preemptions": 4,
        "recomputed_tokens": 50,
        "output_throughput": 3.3,
        "ttft_mean": 1.5,
        "ttft_p99": 3.0,
        "worst_wait": 3.0,
        "tpot_p50": 200.0,
        "tpot_p99": 300.0,
        "blocks_used": 80.0,
        "most_passed": 2,
    }


@pytest.mark.parametrize(("share", "value"), [(0.01, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.99, 5), (1.0, 5)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile([5, 3, 1, 2, 4], share) == value


def test_all_systems_serve_a_trace_and_the_record_has_every_figure(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drawing = tmp_path / "x.json", tmp_path / "x.svg"
    options = ["--trace", trace, "--blocks", "100", "--json", str(target), "--plot", str(drawing)]
    assert main(["bench", "schedule", *options]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(r["case"], r["system"], r["metric"], r["unit"]) for r in rows] == [
        ("alike", system, metric, unit) for system in SYSTEMS for metric, unit, _, _ in METRICS
    ]
    preemptions = {r["system"]: r["median"] for r in rows if r["metric"] == "preemptions"}
    assert preemptions["vllm-fcfs"] > 10 > preemptions["kvcompile"]
    out = capsys.readouterr().out
    assert "alike, 100 blocks, simulated worker" in out
    assert all(f"{heading}, {unit}" in out for _, unit, heading, _ in METRICS)
    assert ET.fromstring(drawing.read_text()).tag.endswith("svg")


def test_a_generated_mix_is_run_with_a_seed_for_each_run(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    options = ["--mix", "calm", "--requests", "12", "--runs", "2", "--synchronous", "--json", str(target)]
    assert main(["bench", "schedule", *options]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert {(r["case"], r["runs"]) for r in rows} == {("calm", 2)}
    by = {(r["system"], r["metric"]): (r["median"], r["min"], r["max"]) for r in rows}
    for metric, *_ in METRICS:  # no pressure, no difference
        assert by["kvcompile", metric] == by["vllm-fcfs", metric] == by["vllm-least-computed", metric]
    assert by["kvcompile", "ttft_mean"][1] < by["kvcompile", "ttft_mean"][2]


@pytest.mark.parametrize("option", ["--requests", "--runs", "--blocks", "--max-num-seqs", "--max-num-batched-tokens"])
def test_a_count_below_one_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", option, "0"]) == 2
    assert capsys.readouterr().err == f"kvcompile: error: {option} is 0; allowed is 1 or more\n"


@pytest.mark.parametrize("given", ["", "1,2,3", "1,2,3,x", "0,1,1,1", "1,-1,1,1", "nan,1,1,1"])
def test_a_step_time_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", "--step-time", given]) == 2
    said = f"--step-time is {given!r}; allowed are four numbers: ms a step, us a prompt token, "
    assert said in capsys.readouterr().err


def test_a_request_that_the_pool_cannot_hold_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", "--trace", trace, "--blocks", "10"]) == 2
    said = "a request of 160 tokens needs 10 blocks, the pool has 9 (one is vLLM's own); give more --blocks"
    assert said in capsys.readouterr().err
    assert main(["bench", "schedule", "--trace", trace, "--blocks", "11"]) == 0


def test_a_trace_and_a_mix_are_refused_together(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", "--trace", trace, "--mix", "calm"]) == 2
    assert "--trace and --mix are both given; keep one of the two" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_result_into_a_missing_folder_is_refused_before_anything_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "schedule", option, str(tmp_path / "no" / "x")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err


def test_an_engine_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mix", "calm", "--requests", "3", "--runs", "1", "--engine", str(tmp_path)]
    assert main(["bench", "schedule", *options]) == 2
    assert f"--engine {tmp_path}: no folder with a config.json" in capsys.readouterr().err


def test_an_engine_that_schedules_otherwise_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(record, "gpu", lambda: None)
    real = {system: {**schedule_engine.simulate(system), "tokens": [[1]]} for system in ("vllm-fcfs", "kvcompile")}
    monkeypatch.setattr(engine_process, "call", lambda function, model, system: real[system])
    options = ["bench", "schedule", "--mix", "calm", "--requests", "3", "--runs", "1", "--engine", str(tmp_path)]
    assert main(options) == 0
    said = "Measuring engines that schedule asynchronously needs a GPU: on a CPU vLLM schedules synchronously."
    assert said in capsys.readouterr().out
    real["kvcompile"] = {**real["kvcompile"], "preemptions": 77}
    assert main(options) == 1
    assert "0 simulated, 77 real" in capsys.readouterr().out
    real["kvcompile"] = {**real["vllm-fcfs"], **schedule_engine.simulate("kvcompile"), "tokens": [[2]]}
    assert main(options) == 1


def test_the_overhead_is_of_both_systems_with_the_same_number_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule_overhead, "WAITING", (20,))
    monkeypatch.setattr(schedule_overhead, "_STEPS", 30)
    rows = schedule_overhead.measure(1)
    assert [(r["case"], r["system"], r["metric"], r["unit"]) for r in rows] == [
        (f"20 waiting, {pool}", system, "schedule_time", "us")
        for pool in ("enough blocks", "few blocks")
        for system in ("vllm-fcfs", "kvcompile")
    ]
    assert all(row["median"] > 0 for row in rows)
    assert "20 waiting, few blocks" in capsys.readouterr().out


def test_the_drawing_has_a_bar_for_each_figure_and_a_line_for_each_system() -> None:
    rows = [
        {"case": "a<b", "system": system, "metric": metric, "median": value}
        for system, value in (("vllm-fcfs", 40), ("kvcompile", 0))
        for metric in ("preemptions", "ttft_mean")
    ]
    series = {("a<b", system): [(1.0, 5), (2.0, 10)] for system in ("vllm-fcfs", "kvcompile")}
    drawn = ET.fromstring(bench_schedule_plot.draw(rows, series, ("vllm-fcfs", "kvcompile")))
    lines = [e for e in drawn.iter() if e.tag.endswith("polyline")]
    # From the middle to the end of 420 in width, from half to all of 112 in height.
    assert [line.get("points") for line in lines] == ["640.0,168.0 850.0,112.0"] * 2
    titles = [e.text for e in drawn.iter() if e.tag.endswith("title")]
    assert titles[1:5] == ["vllm-fcfs: 40", "kvcompile: 0", "vllm-fcfs: 40.00", "kvcompile: 0.00"]
    assert "a<b" in "".join(drawn.itertext())
