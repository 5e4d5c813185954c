"""What vLLM's configuration, the preset and the start-up line make of a W4A8 checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform

from kvcompile.integrations.vllm import report
from kvcompile.integrations.vllm.linear_config import W4A8Config
from tests.integrations.w4a8_checkpoints import QUANTISED

# --- vLLM's configuration -------------------------------------------------------------------------------------------


@pytest.fixture
def quantised(checkpoint):
    return checkpoint(quantization_config=QUANTISED)


def test_vllm_knows_the_quantisation_on_every_platform(monkeypatch):
    assert "kvcompile_w4a8" in QUANTIZATION_METHODS
    assert get_quantization_config("kvcompile_w4a8") is W4A8Config
    current_platform.verify_quantization("kvcompile_w4a8")
    assert W4A8Config.get_min_capability() == 80


def test_activations_in_fp32_are_for_the_cpu_only(monkeypatch):
    assert torch.float32 in W4A8Config().get_supported_act_dtypes()
    monkeypatch.setattr(CpuPlatform, "is_cpu", lambda self: False)
    assert W4A8Config().get_supported_act_dtypes() == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("asked", [True, False])
def test_a_checkpoint_names_its_quantisation_itself(build, engine_args, quantised, asked):
    config: VllmConfig = (build if asked else lambda **f: engine_args(**f).create_engine_config())(model=quantised)
    assert config.model_config.quantization == "kvcompile_w4a8"
    assert config.quant_config.group_sizes == {128: 128, 256: 64}
    assert config.quant_config.skipped == ["lm_head"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_plain_checkpoint_may_be_quantised_while_it_loads(build, engine_args, llama, asked):
    make = build if asked else lambda **f: engine_args(**f).create_engine_config()
    config = make(quantization="kvcompile_w4a8")
    assert config.quant_config.group_sizes is None


def test_the_compile_cache_key_changes_with_what_the_checkpoint_says(build, quantised):
    """In one folder: the path is part of the key, and would hide that the rest is too."""
    hashes = [build(model=quantised).compute_hash()]
    for changes in ({"group_sizes": {"128": 64, "256": 64}}, {"modules_to_not_convert": []}):
        text = json.loads((quantised / "config.json").read_text())
        (quantised / "config.json").write_text(json.dumps({**text, "quantization_config": {**QUANTISED, **changes}}))
        hashes.append(build(model=quantised).compute_hash())
    assert len(set(hashes)) == 3


def test_the_compile_cache_key_changes_with_quantising_while_loading(build):
    assert build().compute_hash() != build(quantization="kvcompile_w4a8").compute_hash()


# --- refused before a worker starts ---------------------------------------------------------------------------------


def test_a_wrong_description_is_one_line(refusal, checkpoint):
    line = refusal(model=checkpoint(quantization_config={**QUANTISED, "format": 7}))
    assert line.startswith("quantization_config: format is 7; this version of kvcompile reads 1; ")


def test_a_group_that_straddles_ranks_is_one_line(refusal, checkpoint):
    wide = checkpoint(
        intermediate_size=384,
        num_key_value_heads=2,
        quantization_config={**QUANTISED, "group_sizes": {"128": 64, "384": 128}},
    )
    line = refusal(model=wide, tensor_parallel_size=2)
    assert line.startswith(
        "layer down_proj: groups of 128 do not divide the 192 input channels of one rank (384 over 2"
    )


DOWN = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_a_width_that_only_skipped_layers_have_needs_no_group_size(build, checkpoint):
    described = {**QUANTISED, "group_sizes": {"128": 128}, "modules_to_not_convert": ["lm_head", *DOWN]}
    assert build(model=checkpoint(quantization_config=described)).quant_config.group_sizes == {128: 128}


def test_a_width_that_some_layers_still_have_needs_a_group_size(refusal, checkpoint):
    described = {**QUANTISED, "group_sizes": {"128": 128}, "modules_to_not_convert": ["lm_head", DOWN[0]]}
    line = refusal(model=checkpoint(quantization_config=described))
    assert line.startswith("layer down_proj: quantization_config has no group size for an input width of 256, only for")


def test_switching_linear_off_under_a_w4a8_checkpoint_is_refused_with_advice(refusal, quantised):
    assert refusal(model=quantised, additional_config={"kvcompile": {"linear.enabled": False}}) == (
        f"model {quantised}: linear.enabled is false, but its weights are W4A8 and nothing else can serve them; remove "
        "linear.enabled=false, or serve the checkpoint that it was made from"
    )


def test_switching_linear_off_and_asking_for_it_is_refused(refusal, llama):
    fields = {"quantization": "kvcompile_w4a8", "additional_config": {"kvcompile": {"linear.enabled": False}}}
    assert refusal(**fields) == (
        f"model {llama}: linear.enabled is false, but --quantization kvcompile_w4a8 is given; remove one of the two"
    )


def test_lora_is_refused_by_its_flag(refusal, quantised):
    fields = {"enable_lora": True, "additional_config": {"kvcompile": {"kv8.enabled": False}}}
    assert refusal(model=quantised, **fields) == (
        "--enable-lora does not work with W4A8 weights; remove it, or serve an unquantised checkpoint"
    )


# --- the start-up line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"128": 128, "256": 128}, "group size 128 and channel"),
        ({"128": 64, "256": 128}, "group size 128 and 64"),
        ({"128": 64, "256": 64}, "group size 64"),
        ({"128": "channel", "256": "channel"}, "group size channel"),
    ],
)
def test_the_line_names_the_groups_of_a_w4a8_checkpoint(build, checkpoint, startup_lines, sizes, says):
    build(model=checkpoint(quantization_config={**QUANTISED, "group_sizes": sizes}))
    assert f", linear (W4A8 checkpoint, {says}, torch CPU operators, lm_head as it is: " in startup_lines[0]


def test_the_line_says_that_weights_are_quantised_while_loading(build, startup_lines):
    build(quantization="kvcompile_w4a8")
    assert ", linear (W4A8, quantised while loading, torch CPU operators, lm_head int8), prune (" in startup_lines[0]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "the checkpoint is not quantised"),
        ({"quantization": "fp8"}, "the checkpoint is fp8"),
        ({"additional_config": {"kvcompile": {"linear.enabled": False}}}, "linear.enabled=false"),
    ],
)
def test_the_line_says_why_there_are_no_w4a8_linears(build, startup_lines, fields, why):
    build(**fields)
    assert f"linear ({why})" in startup_lines[0].partition("not active: ")[2]


def test_strict_accepts_a_checkpoint_that_leaves_linear_nothing_to_do(build, quantised):
    strict = {"additional_config": {"kvcompile": {"strict": True}}}
    build(**strict)
    build(model=quantised, **strict)
    build(quantization="kvcompile_w4a8", **strict)


def test_only_the_reason_of_a_checkpoint_is_no_obstacle(build, quantised):
    config = build(model=quantised)
    assert report.in_the_way(config, {"linear": "something else", "kv8": "reason"}) == {
        "linear": "something else",
        "kv8": "reason",
    }
    assert report.in_the_way(build(), {"kv8": "reason"}) == {"kv8": "reason"}
