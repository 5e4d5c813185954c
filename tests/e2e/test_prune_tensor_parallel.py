"""Pruning on two ranks of one tensor parallel group: each scores and moves its own heads, all of them or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pruned_engine import FIELDS
from tests.pruned_ranks import STEP_TOKENS, assert_pruned, serve
from tests.served_trace import random_llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks take two cores"),
]


def test_two_ranks_answer_as_a_llama_that_keeps_the_same_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "model")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    prompts, served = serve(
        model,
        compilation={"mode": 0},
        fields={**FIELDS, "max_num_batched_tokens": STEP_TOKENS},
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"},
    )
    assert_pruned(model, prompts, served, apart=0.005)
