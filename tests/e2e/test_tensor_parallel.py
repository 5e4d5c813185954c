"""Two ranks: every fused norm still stands behind the all-reduce that sums what the ranks have computed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.compiled_engine import operator_calls
from tests.e2e.w4a8_model import LAYERS, logprobs, write_plain, write_quantised
from tests.engine import run_python

SERVE = """
    import json, os, sys
    from vllm import LLM, SamplingParams, TokensPrompt

    from kvcompile.presets import compilation_config

    prompts = [[(7 * i * i + 31 * j) % 509 for i in range(1, n + 1)] for j, n in enumerate((3, 40, 130))]
    llm = LLM(
        sys.argv[1],
        tensor_parallel_size=2,
        compilation_config=compilation_config(use_inductor_graph_partition=True),
        additional_config={"kvcompile": {"strict": True}},
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0, logprobs=0
    )
    for output in llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False):
        tokens, scored = output.prompt_token_ids, output.prompt_logprobs[1:]
        values = [given[t].logprob for given, t in zip(scored, tokens[1:], strict=True)]
        print("SCORED", json.dumps([list(tokens), values]), flush=True)
    # Not left to the end of the interpreter, which a thread of vLLM's does not survive if the engine takes its time.
    # And no such end at all: on a busy host another thread made it fail ("terminate called without an exception").
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)
"""
INTERMEDIATE = 512  # of which each rank has whole groups


def _sums_and_norms(code: str) -> list[str]:
    """In order: "sum B" for an all-reduce of buffer B, "norm B" for a fused norm whose x is B, "B" for a new buffer."""
    events = []
    for line in code.splitlines():
        if found := re.search(r"torch\.ops\._C\.shm_allreduce\.default\(\d+, (\w+)\)", line):
            events.append(f"sum {found[1]}")
        elif found := re.search(r"fused_add_rms_norm_quant\.default\((\w+), ", line):
            events.append(f"norm {found[1]}")
        elif found := re.match(r"\s*(buf\d+) = ", line):
            events.append(found[1])
    return events


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks take two cores")
def test_a_fused_norm_reads_what_all_ranks_have_summed(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", intermediate=INTERMEDIATE)
    quantised = write_quantised(tmp_path / "w4a8", plain)
    caches = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    first, second, *_ = sorted(os.sched_getaffinity(0))
    log = run_python(SERVE, quantised, environment={**caches, "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"})

    # One graph on each rank, as Inductor left it in its cache.
    codes = [path.read_text() for path in tmp_path.rglob("*.py") if "inductor" in str(path)]
    codes = [code for code in codes if operator_calls(code)["kvcompile::w4a8_linear"]]
    assert len(codes) == 2
    for code in codes:
        calls = operator_calls(code)
        assert calls["kvcompile::fused_add_rms_norm_quant"] == 2 * LAYERS - 1
        a_layer = ("kvcompile::silu_mul_quant", "kvcompile::rotary", "kvcompile::pruned_kv8_attention")
        assert [calls[name] for name in a_layer] == [LAYERS] * 3
        events = _sums_and_norms(code)
        norms = [event.split()[1] for event in events if event.startswith("norm")]
        assert len(norms) == 2 * LAYERS - 1
        # o_proj and down_proj of every layer, and the embedding.
        assert sum(event.startswith("sum") for event in events) == 2 * LAYERS + 1
        for buffer in norms:
            assert events.index(buffer) < events.index(f"sum {buffer}") < events.index(f"norm {buffer}")

    # What a norm of one rank's part would give is nowhere near the model. Each rank quantises its part of an input by
    # its own scale, so this is as near as quantisation is, not nearer.
    scored = [json.loads(line) for line in re.findall(r"^SCORED (.*)$", log, re.MULTILINE)]
    ours = torch.tensor([value for _, values in scored for value in values], dtype=torch.float64)
    wanted, unquantised = (torch.cat([logprobs(model, tokens) for tokens, _ in scored]) for model in (quantised, plain))
    difference, error = (ours - wanted).abs().mean(), (unquantised - wanted).abs().mean()
    print(f"two ranks: {difference:.5f} from the transcription, {error:.5f} from the unquantised model")
    assert difference < error / 4
