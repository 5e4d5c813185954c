"""`kvcompile bench schedule --engine` on a GPU: what it measures, with the engines replaced or on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcompile.schedule.trace import H200_LLAMA_8B, Step
from kvcompile.tools import engine_process, record, schedule_measured
from kvcompile.tools.schedule_metrics import METRICS

GPU = "a GPU"


def _folder(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_without_a_gpu_it_says_that_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "gpu", lambda: None)
    assert schedule_measured.measure(_folder(tmp_path), 1) == []
    said = "Measuring engines that schedule asynchronously needs a GPU: on a CPU vLLM schedules synchronously.\n"
    assert capsys.readouterr().out == said


def test_a_model_of_too_few_positions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    said = "needs a model of 1,536 positions; that of --engine has 1,535"
    assert schedule_measured.why_not(_folder(tmp_path, max_position_embeddings=1535)) == said
    assert schedule_measured.why_not(_folder(tmp_path, max_position_embeddings=1536)) is None


def test_every_request_of_the_mix_fits_the_positions_and_nobody_reaches_the_limit() -> None:
    traces = [schedule_measured.chat(seed) for seed in range(3)]
    assert [len(trace) for trace in traces] == [192] * 3
    assert traces[0] != traces[1] and traces[0] == schedule_measured.chat(0)
    for arrival in sum(traces, []):
        assert arrival.prompt_tokens <= 512 and arrival.output_tokens < arrival.max_tokens == 1024


def test_rows_are_of_both_systems_and_the_step_time_of_vllm_s_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step(n % 3 * 700, n, 300 * n + n * n) for n in range(1, 120)]
    slower = {"vllm-fcfs": 1.0, "kvcompile": 2.0}

    def call(function: Any, model: str, system: str, runs: int) -> list[dict[str, Any]]:
        assert function is schedule_measured.served
        timed = [(list(step), slower[system] * H200_LLAMA_8B.seconds(step)) for step in steps]
        return [{"measures": {metric: run + 1.0 for metric, *_ in METRICS}, "timed": timed} for run in range(runs)]

    monkeypatch.setattr(record, "gpu", lambda: GPU)
    monkeypatch.setattr(engine_process, "call", call)
    rows = schedule_measured.measure(_folder(tmp_path), 3)
    names = [(row["system"], row["metric"], row["unit"]) for row in rows]
    fitted = [
        ("vllm-fcfs", "step_base", "ms"),
        ("vllm-fcfs", "step_prompt_token", "us"),
        ("vllm-fcfs", "step_decoding_request", "us"),
        ("vllm-fcfs", "step_context_token", "ns"),
    ]
    measured = [(system, metric, unit) for system in slower for metric, unit, *_ in METRICS]
    missed = [("vllm-fcfs", "step_error", "%"), ("simulation", "step_error", "%")]
    assert names == measured + fitted + missed
    assert {row["case"] for row in rows} == {"chat, engine, asynchronous"}
    assert {row["runs"] for row in rows[:-2]} == {3}
    assert [row["median"] for row in rows[-6:]] == pytest.approx([6.1, 17.1, 6.6, 31, 0, 0], rel=1e-4, abs=1e-6)
    out = capsys.readouterr().out
    title = "192 requests, 40 a second, 1500 blocks, real engine, asynchronous: median (min to max)"
    assert title in " ".join(out.split())  # a title wider than its table is wrapped
    assert "6.1,17.1,6.6,31  0.0 %  fitted to 357 steps of vLLM\n" in out
    assert "6.1,17.1,6.6,31  0.0 %  default\n" in out


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_engine_serves_the_mix_as_it_comes_and_times_its_steps(tiny_llama: Path) -> None:
    other = {
        "hf_overrides": {"max_position_embeddings": 1536},
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": 400,
        "max_num_batched_tokens": 1024,
        "compilation": {"mode": 0},
    }
    runs = engine_process.call(schedule_measured.served, str(tiny_llama), "kvcompile", 2, 6, other)
    assert len(runs) == 2
    for seed, run in enumerate(runs):
        trace = schedule_measured.chat(seed, 6)
        measures, steps = run["measures"], [Step(*step) for step, _ in run["timed"]]
        assert measures["preemptions"] == measures["recomputed_tokens"] == 0
        assert 0 < measures["ttft_mean"] <= measures["ttft_p99"] <= measures["worst_wait"]
        assert measures["output_throughput"] > 0 and measures["tpot_p50"] > 0
        assert all(seconds > 0 for _, seconds in run["timed"])
        # The whole prompt, but for single tokens that are left of one, and each token but the first by itself.
        assert sum(step.prefill_tokens + step.decode_requests for step in steps) == sum(
            arrival.prompt_tokens + arrival.output_tokens - 1 for arrival in trace
        )
