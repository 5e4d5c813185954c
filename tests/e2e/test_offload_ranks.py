"""Offload on two ranks of one tensor parallel group: the tokens of a pool in which nobody is preempted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import offload_engine
from tests.served_trace import mixed, random_aborts, random_llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks take two cores"),
]

TRACE = mixed(40)
ABORTS = random_aborts(len(TRACE), 200)
ORDER = {"scheduler": {"enabled": False}}
# Its workers are processes of their own.
ELSEWHERE = """
def worker_pool():
    return None
"""


def test_two_ranks_answer_as_where_nobody_is_preempted(tiny_llama: Path, tmp_path: Path) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "model")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    ranks = {
        "tensor_parallel_size": 2,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"},
        "code": ELSEWHERE,
    }
    (whole,) = offload_engine.serve(model, ORDER, [(TRACE, {})], blocks=400, **ranks)
    options = {**ORDER, "offload": {"enabled": True, "cpu_bytes_to_use": 8 << 20}}
    run, aborted = offload_engine.serve(model, options, [(TRACE, {}), (TRACE, ABORTS)], blocks=50, **ranks)
    assert whole["preemptions"] == 0
    assert run["tokens"] == whole["tokens"]
    assert run["preemptions"] > 10 and run["restores"] > 0.9 * run["preemptions"]
    assert (run["recomputed_tokens"], run["lost_blocks"], run["fallbacks"]) == (0, 0, {})
    assert aborted["aborted"]
    for index, tokens in enumerate(aborted["tokens"]):
        expected = whole["tokens"][index]
        assert tokens == (expected[: len(tokens)] if index in aborted["aborted"] else expected), index
    assert (aborted["left_blocks"], aborted["known"]) == (0, 0)
