"""The scheduler in a real engine: tokens as stock vLLM gives them, and the steps that the simulation says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcompile.tools import schedule_engine


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_pressure_a_real_engine_gives_stocks_tokens_in_the_steps_of_the_simulation(tiny_llama: Path) -> None:
    rows, agrees = schedule_engine.check(str(tiny_llama))
    found = {(row["case"], row["system"], row["metric"]): row["median"] for row in rows}
    for system in ("vllm-fcfs", "kvcompile"):
        for metric in ("preemptions", "steps"):
            real, simulated = (found[f"24 at once, {where}", system, metric] for where in ("engine", "simulated"))
            assert real == simulated, (system, metric)
    assert found["24 at once, engine", "vllm-fcfs", "preemptions"] == 11
    assert found["24 at once, engine", "kvcompile", "preemptions"] == 0
    assert agrees  # the tokens too
