"""The pass pipeline runs inside vLLM's real compile path, and no compile cache hides a change from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine import run_python

GENERATE = """
    import os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        compilation_config="kvcompile",
        additional_config={"kvcompile": {"strict": sys.argv[2] == "strict"}},
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
    )
    mode = llm.llm_engine.vllm_config.compilation_config.mode.name
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    print("MODE", mode)
    print("TOKENS", output[0].outputs[0].token_ids)
"""
GRAPH = re.compile(r"kvcompile passes: graph (\d+), (\d+) nodes")


def _graphs(output: str) -> list[int]:
    assert "MODE VLLM_COMPILE" in output
    return [int(number) for number, _nodes in GRAPH.findall(output)]


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_pipeline_sees_the_three_graphs_of_a_llama_once_and_again_only_when_the_configuration_changes(
    smollm2_checkpoint: Path, tmp_path: Path
) -> None:
    caches = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    cold = run_python(GENERATE, smollm2_checkpoint, "lenient", environment=caches)
    # Piecewise: embedding to the first attention, attention to attention (shared by 29 layers), last to the norm.
    assert _graphs(cold) == [1, 2, 3]
    warm = run_python(GENERATE, smollm2_checkpoint, "lenient", environment=caches)
    assert _graphs(warm) == [], "the same configuration must come out of the cache"
    changed = run_python(GENERATE, smollm2_checkpoint, "strict", environment=caches)
    assert _graphs(changed) == [1, 2, 3], "another configuration must miss the cache"
    tokens = [re.search(r"^TOKENS (.*)$", text, re.MULTILINE).group(1) for text in (cold, warm, changed)]
    assert len(set(tokens)) == 1
