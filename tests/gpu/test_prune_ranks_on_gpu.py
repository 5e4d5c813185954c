"""Pruning on two GPUs: with CUDA graphs and asynchronous scheduling, on either of vLLM's runners."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pruned_ranks import assert_pruned, serve
from tests.served_trace import random_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks take two GPUs"),
]


@pytest.mark.parametrize("version", [2, 1])
def test_two_ranks_answer_as_a_llama_that_keeps_the_same_tokens(tiny_llama: Path, tmp_path: Path, version: int) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "model")
    prompts, served = serve(
        model,
        compilation={},
        fields={"dtype": "float16", "kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.3},
        environment={"VLLM_USE_V2_MODEL_RUNNER": str(version - 1), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")},
    )
    assert served["asynchronous"] is True
    assert_pruned(model, prompts, served, apart=0.1)
