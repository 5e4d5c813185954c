"""A warm start never serves the graph of other sources: vLLM's and Inductor's caches are keyed by them."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

import kvcompile
from tests.engine import run_python

SERVE = """
    import json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torch.profiler import profile
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        sys.argv[1],
        compilation_config="kvcompile",
        quantization="kvcompile_w4a8",
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 1},
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=4,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    with profile() as events:
        llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), sampling, use_tqdm=False)
    import kvcompile.passes.swiglu_quant as source
    calls = {event.key: event.count for event in events.key_averages() if event.key.endswith("_quant")}
    print("RAN", json.dumps({"source": source.__file__, "calls": calls}))
"""
FUSED = {"kvcompile::rms_norm_quant": 1, "kvcompile::fused_add_rms_norm_quant": 1, "kvcompile::silu_mul_quant": 1}
FIND = "    gate_up = _of_kernel(y) or _of_product(y)\n"


def _copy_of_the_package(folder: Path) -> Path:
    """kvcompile as one folder, the way a wheel installs it."""
    package = folder / "kvcompile"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(kvcompile.__file__).parent, package, ignore=ignore)
    for name in ("integrations", "ops", "passes", "tools"):
        source = importlib.import_module(f"kvcompile.{name}").__path__[0]
        shutil.copytree(source, package / name, ignore=ignore)
    return package


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_change_in_the_source_of_a_pass_gives_a_new_graph_on_a_warm_start(tiny_llama: Path, tmp_path: Path) -> None:
    package = _copy_of_the_package(tmp_path / "installed")
    environment = {
        "PYTHONPATH": str(package.parent),
        "PYTHONSAFEPATH": "1",  # the folder from which the tests run holds a `kvcompile` too
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }

    def serve() -> tuple[list[str], dict[str, int]]:
        """What the passes did to each graph that was compiled, and the quantisers that then ran, fused ones by name."""
        log = run_python(SERVE, tiny_llama, environment=environment)
        ran = json.loads(re.search(r"^RAN (.*)$", log, re.MULTILINE).group(1))
        assert Path(ran["source"]) == package / "passes" / "swiglu_quant.py"
        return re.findall(r"kvcompile passes: graph \d+, \d+ nodes, [\d.]+ ms: (.*)", log), ran["calls"]

    # A graph to the first attention and one from the last.
    cold = ["norm_quant 1 of 1, swiglu_quant 0 of 0, attention_swap 0 of 0"]
    cold += ["norm_quant 1 of 1, swiglu_quant 1 of 1, attention_swap 0 of 0"]
    assert serve() == (cold, FUSED)
    assert serve() == ([], FUSED), "the same sources must come out of the cache"

    source = package / "passes" / "swiglu_quant.py"
    text = source.read_text()
    assert text.count(FIND) == 1
    source.write_text(text.replace(FIND, "    return None\n"))
    edited = [line.replace("swiglu_quant 1 of 1", "swiglu_quant 0 of 0") for line in cold]
    without = {name: count for name, count in FUSED.items() if "silu" not in name}
    assert serve() == (edited, without), "other sources must miss the cache"

    source.write_text(text)
    assert serve() == ([], FUSED), "each of them must find its own graph again"
