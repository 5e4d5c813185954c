"""Installed but not asked for, kvcompile changes nothing: same configuration, same graph, same tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine import run_python

GENERATE = """
    import os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=16 << 20,
        max_num_seqs=4,
        seed=7,
    )
    config = llm.llm_engine.vllm_config
    print("PLUGIN", "kvcompile.integrations.vllm.compat" in sys.modules)
    print("HASH", config.compute_hash())
    print("MODE", config.compilation_config.mode.name, config.cache_config.cache_dtype, config.attention_config.backend)
    prompts = [TokensPrompt(prompt_token_ids=list(range(3, 3 + n))) for n in (5, 40, 130)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    for output in llm.generate(prompts, sampling):
        print("TOKENS", list(output.outputs[0].token_ids))
"""


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_stock_engine_is_the_same_with_kvcompile_installed(tiny_llama: Path, tmp_path: Path) -> None:
    def run(name: str, **environment: str) -> tuple[list[str], set[str]]:
        root = tmp_path / name  # a cache of its own: the second run must compile for itself
        caches = {"VLLM_CACHE_ROOT": str(root), "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor")}
        output = run_python(GENERATE, tiny_llama, environment={**caches, **environment})
        said = re.findall(r"^(?:PLUGIN|HASH|MODE|TOKENS) .*$", output, re.MULTILINE)
        # Inductor files a compiled graph under a hash of the graph and of every option that it was compiled with.
        return said, {path.name for path in root.rglob("fxgraph/*/*")}

    without, graphs_without = run("without", VLLM_PLUGINS="none-of-them")
    with_plugin, graphs_with = run("with")
    assert without[0] == "PLUGIN False"
    assert with_plugin[0] == "PLUGIN True"
    assert len(without) == 6
    assert with_plugin[1:] == without[1:]
    assert graphs_without
    assert graphs_with == graphs_without
