"""After loading, GPU memory holds the 4-bit weights once; a product adds at most one rebuilt weight while it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from kvcompile.ops import w4a8
from kvcompile.tools.bench_w4a8_systems import Unavailable, load_cutlass
from tests.engine import run_python
from tests.gpu.llama_8b import HIDDEN, INTERMEDIATE, VOCABULARY, llama_8b
from tests.ops.w4a8.weights import make_activations, make_weight

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LAYERS, GROUP = 6, 128
LINEARS = ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
KV_CACHE_BYTES = 64 << 20
# cuBLAS's workspace, rotary tables, the sampler's and the runner's buffers; a second copy of the weights is 640 MiB.
REST = 200 << 20
LOAD = """
    import os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization="kvcompile_w4a8",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=int(sys.argv[2]),
    )
    torch.cuda.synchronize()
    print("ALLOCATED", torch.cuda.memory_allocated())
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([TokensPrompt(prompt_token_ids=[i % 1000 + 3 for i in range(n)]) for n in (5, 1500)], sampling)
    torch.cuda.synchronize()
    print("AFTER", torch.cuda.memory_allocated())
"""


def test_a_loaded_model_takes_what_its_4_bit_weights_need(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_8b(LAYERS)))
    said = run_python(LOAD, tmp_path, str(KV_CACHE_BYTES))
    # Codes, a scale and a zero of each group, a scale of each channel.
    linears = LAYERS * sum(n * k // 2 + n * (k // GROUP) * 2 + n * 4 for n, k in LINEARS)
    embedding, head = 2 * VOCABULARY * HIDDEN, VOCABULARY * (HIDDEN + 2)  # int8, a bf16 scale of each row
    needed = linears + embedding + head + (2 * LAYERS + 1) * 2 * HIDDEN + KV_CACHE_BYTES
    for word in ("ALLOCATED", "AFTER"):
        (allocated,) = map(int, re.findall(rf"^{word} (\d+)$", said, re.MULTILINE))
        print(f"\n{word}: {allocated / 2**20:.0f} MiB, of which {needed / 2**20:.0f} are weights and KV cache")
        assert needed <= allocated < needed + REST


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (28672, 4096)])
def test_a_product_of_many_tokens_takes_one_rebuilt_weight_and_gives_it_back(rows: int, columns: int) -> None:
    try:
        load_cutlass()
    except Unavailable as reason:
        pytest.skip(f"cuBLAS's product, which takes more, runs here: {reason}")
    weight = make_weight(256, columns, GROUP).cuda()
    repeat = rows // 256
    tiles, params = (each.repeat(repeat, 1, 1) for each in (weight.tiles, weight.group_params))
    scales = weight.arguments[-1].repeat(repeat)
    x_q, x_scale = (each.cuda() for each in make_activations(512, columns))
    arguments = x_q, x_scale, tiles, params, scales, None, torch.bfloat16
    w4a8.w4a8_linear(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = w4a8.w4a8_linear(*arguments)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    assert rows * columns <= most - y.nbytes <= rows * columns + (1 << 20)
    del y
    assert torch.cuda.memory_allocated() == before
