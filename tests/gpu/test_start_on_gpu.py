"""On a GPU the same flag starts and answers, with CUDA graphs and asynchronous scheduling on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine import run_python

GENERATE = """
    import os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    options = {
        "kvcompile": {"compilation_config": "kvcompile"},
        "stock": {"kv_cache_dtype": "int8_per_token_head", "attention_backend": "TRITON_ATTN"},
    }[sys.argv[2]]
    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=8,
        seed=7,
        **options,
    )
    config = llm.llm_engine.vllm_config
    print("ASYNC", config.scheduler_config.async_scheduling)
    print("GRAPHS", config.compilation_config.cudagraph_mode.name)
    print("BACKEND", config.attention_config.backend.name, config.cache_config.cache_dtype)
    prompts = [TokensPrompt(prompt_token_ids=[(7 * i + n) % 1000 + 3 for i in range(n)]) for n in (1, 16, 17, 130, 400)]
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    for output in llm.generate(prompts, sampling):
        print("TOKENS", list(output.outputs[0].token_ids))
"""


def _said(output: str, word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", output, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_the_preset_keeps_graphs_and_asynchronous_scheduling_and_gives_the_tokens_of_vllm_s_int8_kernels(
    tiny_llama: Path,
) -> None:
    ours = run_python(GENERATE, tiny_llama, "kvcompile")
    stock = run_python(GENERATE, tiny_llama, "stock")
    assert _said(ours, "ASYNC") == ["True"]
    assert _said(ours, "GRAPHS") == _said(stock, "GRAPHS") == ["FULL_AND_PIECEWISE"]
    assert _said(ours, "BACKEND") == ["CUSTOM int8_per_token_head"]
    assert _said(stock, "BACKEND") == ["TRITON_ATTN int8_per_token_head"]
    tokens = _said(ours, "TOKENS")
    assert len(tokens) == 5
    assert tokens == _said(stock, "TOKENS")
