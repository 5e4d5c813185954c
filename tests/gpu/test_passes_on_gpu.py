"""The passes on a GPU, at the shapes of Llama-3.1-8B, in both ways of splitting, under CUDA graphs.

`pytest -s tests/gpu/test_passes_on_gpu.py` runs all of it and prints the counts of kernels.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvcompile import llama
from kvcompile.ops import act_quant
from tests.compiled_engine import Compiled, Engine, apart, run_compiled
from tests.gpu.llama_8b import EPSILON, HIDDEN, INTERMEDIATE, llama_8b
from tests.passes.graphs import assert_one_step, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

LAYERS, FEWER = 2, 1
CONFIG = llama_8b(LAYERS)
OFF = {"passes": {"norm_quant": False, "swiglu_quant": False, "rotary": False, "attention_swap": False}}
SPLITS: dict[str, dict[str, Any]] = {"piecewise": {}, "partition": {"use_inductor_graph_partition": True}}
# Inductor rounds where the graph rounds. By itself it leaves that out within what it joins, so that the unfused model
# would differ from its own graph by more than the passes may change.
ROUNDED = {"inductor_compile_config": {"emulate_precision_casts": True}}
STEPS = 8
ARGUMENTS = {"seed": 7, "dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.3}
# Answers are compared, so weights have to matter: vLLM's dummy ones give every token the same log-probability.
SPREAD = 0.02

Engines = dict[str, Compiled]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(7)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=SPREAD).cpu()
        if len(shape) == 2
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape, _ in llama.expected(CONFIG, "config.json")
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _arguments(options: dict[str, Any], **further: Any) -> dict[str, Any]:
    """Of LLM, for a W4A8 model; `options` of kvcompile."""
    config = {"kvcompile": {"strict": True, **options}}
    return {**ARGUMENTS, "quantization": "kvcompile_w4a8", "additional_config": config, **further}


def _dummy(layers: int) -> dict[str, Any]:
    return {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": layers}}


@pytest.fixture(scope="module")
def served(model: Path) -> Engines:
    """Both ways of splitting with the passes and without, and the unquantised model."""
    engines = {"unquantised": Engine(model, ARGUMENTS, None)}
    for split, fields in SPLITS.items():
        engines[f"{split} on"] = Engine(model, _arguments({}), {**fields, **ROUNDED})
        engines[f"{split} off"] = Engine(model, _arguments(OFF), {**fields, **ROUNDED})
    return run_compiled(engines, model.parent, timeout_s=900)[0]


@pytest.fixture(scope="module", params=SPLITS)
def counted(request: pytest.FixtureRequest, model: Path) -> Engines:
    """Two depths without CUDA graphs: what runs by itself here is what the graph of a decode step would hold."""
    fields = {**SPLITS[request.param], "cudagraph_mode": "NONE"}
    engines = {
        f"{state} {layers}": Engine(model, _arguments(options, **_dummy(layers)), fields, STEPS)
        for state, options in (("on", {}), ("off", OFF))
        for layers in (FEWER, LAYERS)
    }
    print(f"\n{request.param}")
    return run_compiled(engines, model.parent, timeout_s=900)[0]


def _counts(compiled: Compiled) -> list[dict[str, int]]:
    """Calls of each kind of graph once: vLLM may compile one for more than one range of batch sizes."""
    kinds: list[dict[str, int]] = []
    for found in compiled.calls():
        counts = {name: count for name, count in found.items() if "kv_cache_update" not in name}
        if counts and counts not in kinds:
            kinds.append(counts)
    return kinds


def test_the_whole_graph_has_two_norms_one_swiglu_and_one_attention_a_layer_of_ours(served: Engines) -> None:
    assert _counts(served["partition on"]) == [
        {
            "kvcompile::rms_norm_quant": 1,
            "kvcompile::fused_add_rms_norm_quant": 2 * LAYERS - 1,
            "kvcompile::silu_mul_quant": LAYERS,
            "kvcompile::quant_per_token": LAYERS,
            "kvcompile::rotary": LAYERS,
            "kvcompile::pruned_kv8_attention": LAYERS,
            "kvcompile::w4a8_linear": 4 * LAYERS,
        }
    ]
    assert _counts(served["partition off"]) == [
        {
            "kvcompile::quant_per_token": 4 * LAYERS,
            "vllm::unified_attention_with_output": LAYERS,
            "kvcompile::w4a8_linear": 4 * LAYERS,
        }
    ]


def test_the_three_pieces_have_them_too_and_attention_is_in_none(served: Engines) -> None:
    norm, swiglu = "kvcompile::fused_add_rms_norm_quant", "kvcompile::silu_mul_quant"
    linear, quantiser, rotary = "kvcompile::w4a8_linear", "kvcompile::quant_per_token", "kvcompile::rotary"
    assert _counts(served["piecewise on"]) == [
        {"kvcompile::rms_norm_quant": 1, linear: 1, rotary: 1},
        {quantiser: 1, norm: 2, swiglu: 1, linear: 4, rotary: 1},
        {quantiser: 1, norm: 1, swiglu: 1, linear: 3},
    ]
    assert _counts(served["piecewise off"]) == [{quantiser: n, linear: n} for n in (1, 4, 3)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("state", ["on", "off"])
def test_cuda_graphs_stay_full_and_piecewise(served: Engines, split: str, state: str) -> None:
    engine = served[f"{split} {state}"]
    assert (engine.mode, engine.cuda_graphs) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_the_same_with_and_without_the_passes(served: Engines, split: str) -> None:
    ours, theirs = served[f"{split} on"], served[f"{split} off"]
    difference, error = apart(ours, theirs), apart(theirs, served["unquantised"])
    same = sum(a[:-5] == b[:-5] for (a, _), (b, _) in zip(ours.answers, theirs.answers, strict=True))
    print(
        f"\n{split}: log-probabilities {difference:.6f} apart with and without the passes, {error:.6f} from the "
        f"unquantised model; {same} of {len(ours.answers)} first tokens are the same"
    )
    assert math.isfinite(error) and error > 0
    # One last bit of a norm moves an activation to the next int8 step now and then; a wrong site moves everything.
    assert difference < error / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_fused_site_is_within_one_step_of_what_it_replaced(compiled: bool, tokens: int, dtype: torch.dtype) -> None:
    from tests.passes.unfused import UNFUSED

    x, residual = (random(tokens, HIDDEN, dtype=dtype, seed=seed).cuda() for seed in (1, 2))
    weight = (1 + random(HIDDEN, dtype=dtype, seed=3) / 4).cuda()
    gate_up = random(tokens, 2 * INTERMEDIATE, dtype=dtype, seed=4).cuda()
    inputs = {
        "rms_norm_quant": (x, weight, EPSILON),
        "fused_add_rms_norm_quant": (x, residual, weight, EPSILON),
        "silu_mul_quant": (gate_up,),
    }
    assert inputs.keys() == UNFUSED.keys()
    for name, given in inputs.items():
        unfused = UNFUSED[name]
        if compiled:
            options = {"emulate_precision_casts": True}
            unfused = torch.compile(unfused, fullgraph=True, dynamic=True, options=options)
        ours, theirs = getattr(act_quant, name)(*given), unfused(*given)
        assert_one_step(tuple(t.cpu() for t in ours), tuple(t.cpu() for t in theirs))


def test_a_decoded_layer_takes_one_kernel_less_for_each_fused_site(counted: Engines) -> None:
    assert {engine.cuda_graphs for engine in counted.values()} == {"NONE"}
    per_layer = {}
    for state in ("on", "off"):
        few, many = (counted[f"{state} {layers}"].decode_kernels for layers in (FEWER, LAYERS))
        names = sorted(few.keys() | many.keys())
        # What the step does once, for all layers together, is in both.
        counts = {name: (many.get(name, 0) - few.get(name, 0)) / (LAYERS - FEWER) for name in names}
        per_layer[state] = {name: count for name, count in counts.items() if count}
        print(f"\npasses {state}: {sum(per_layer[state].values()):g} kernels per decoded layer")
        for name, count in per_layer[state].items():
            print(f"    {count:g} {name[:110]}")
    on, off = (sum(per_layer[state].values()) for state in ("on", "off"))
    assert on == int(on) > 0 and off == int(off)
    assert off - on >= 3  # two norms and SwiGLU; Inductor makes one kernel or two of the rotary embedding


def test_vllms_own_fusion_of_attention_runs_in_front_and_changes_nothing(served: Engines, model: Path) -> None:
    # It looks for vLLM's attention operator with a static quantiser behind it, of which there is none here.
    fields = {**SPLITS["partition"], **ROUNDED, "pass_config": {"fuse_attn_quant": True}}
    compiled, _, _ = run_compiled({"fusion": Engine(model, _arguments({}), fields)}, model.parent, timeout_s=900)
    ours, alone = compiled["fusion"], served["partition on"]
    assert _counts(ours) == _counts(alone)
    assert ours.cuda_graphs == "FULL_AND_PIECEWISE"
    assert [tokens for tokens, _ in ours.answers] == [tokens for tokens, _ in alone.answers]
