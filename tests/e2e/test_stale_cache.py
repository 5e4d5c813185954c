"""No compile cache hides a change from the passes: a warm start serves graphs of its own sources and configuration."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvcompile
from tests.engine import run_python

# Arguments: the model, and how `strict` is set in each engine, one after the other in this process.
SERVE = """
    import gc, json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torch.profiler import profile
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory

    for strict in json.loads(sys.argv[2]):
        llm = LLM(
            sys.argv[1],
            compilation_config="kvcompile",
            additional_config={"kvcompile": {"strict": strict}},
            quantization="kvcompile_w4a8",
            load_format="dummy",
            hf_overrides={"num_hidden_layers": 3},
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            max_num_seqs=4,
        )
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        with profile() as events:
            (output,) = llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), sampling, use_tqdm=False)
        import kvcompile.passes.swiglu_quant as source
        said = {
            "mode": llm.llm_engine.vllm_config.compilation_config.mode.name,
            "source": source.__file__,
            "calls": {event.key: event.count for event in events.key_averages() if event.key.endswith("_quant")},
            "token": output.outputs[0].token_ids[0],
        }
        print("RAN", json.dumps(said), flush=True)
        del llm, output, events
        gc.collect()
        cleanup_dist_env_and_memory()
"""
LAYERS = 3  # of SERVE
FUSED = {
    "kvcompile::rms_norm_quant": 1,
    "kvcompile::fused_add_rms_norm_quant": 2 * LAYERS - 1,
    "kvcompile::silu_mul_quant": LAYERS,
}
FIND = "    gate_up = _of_kernel(y) or _of_product(y)\n"
# Embedding to the first attention, attention to attention (one graph for all of those), last attention to the norm.
COLD = [
    "graph 1: norm_quant 1 of 1, swiglu_quant 0 of 0, rotary 1 of 1, attention_swap 0 of 0",
    "graph 2: norm_quant 2 of 2, swiglu_quant 1 of 1, rotary 1 of 1, attention_swap 0 of 0",
    "graph 3: norm_quant 1 of 1, swiglu_quant 1 of 1, rotary 0 of 0, attention_swap 0 of 0",
]


@dataclass(frozen=True)
class Ran:
    """graphs: what the passes did to each that was compiled. calls: of the quantisers that then ran, fused ones."""

    graphs: list[str]
    calls: dict[str, int]
    token: int


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
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_warm_start_compiles_nothing_but_what_another_configuration_or_source_of_a_pass_has_changed(
    tiny_llama: Path, tmp_path: Path
) -> None:
    package = _copy_of_the_package(tmp_path / "installed")
    environment = {
        "PYTHONPATH": str(package.parent),
        "PYTHONSAFEPATH": "1",  # the folder from which the tests run holds a `kvcompile` too
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }

    def serve(*strict: bool) -> list[Ran]:
        log = run_python(SERVE, tiny_llama, json.dumps(strict), environment=environment)
        before, said = (re.split(r"^RAN (.*)$", log, flags=re.MULTILINE)[first::2] for first in (0, 1))
        assert len(said) == len(strict)
        runs = []
        for lines, one in zip(before, map(json.loads, said), strict=False):  # behind the last there are lines too
            assert one["mode"] == "VLLM_COMPILE"
            assert Path(one["source"]) == package / "passes" / "swiglu_quant.py"
            found = re.findall(r"kvcompile passes: (graph \d+), \d+ nodes, [\d.]+ ms(: .*)", lines)
            runs.append(Ran(["".join(each) for each in found], one["calls"], one["token"]))
        return runs

    lenient, strict = serve(False, True)
    token = lenient.token
    assert lenient == Ran(COLD, FUSED, token)
    assert strict == Ran(COLD, FUSED, token), "another configuration must miss the cache"
    warm = Ran([], FUSED, token)
    assert serve(False, True) == [warm, warm], "the same sources and configurations must come out of the cache"

    source = package / "passes" / "swiglu_quant.py"
    text = source.read_text()
    assert text.count(FIND) == 1
    source.write_text(text.replace(FIND, "    return None\n"))
    graphs = [line.replace("swiglu_quant 1 of 1", "swiglu_quant 0 of 0") for line in COLD]
    without = {name: count for name, count in FUSED.items() if "silu" not in name}
    (edited,) = serve(False)
    assert (edited.graphs, edited.calls) == (graphs, without), "other sources must miss the cache"

    source.write_text(text)
    assert serve(False) == [warm], "each of them must find its own graph again"
