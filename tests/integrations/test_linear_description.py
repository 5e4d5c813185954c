"""A quantization_config that vLLM itself would stumble over: one line, with the preset and without."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import checks
from kvcompile.integrations.vllm.linear_config import W4A8Config
from tests.integrations.w4a8_checkpoints import QUANTISED
from tests.integrations.w4a8_layers import PARTS

ALLOWED = (
    'allowed is a table with the quant_method "kvcompile_w4a8", or none at all for a checkpoint that is not quantised; '
    "quantise it anew with `kvcompile quantize`"
)
ONLINE = {"quantization": "kvcompile_w4a8"}
NAMELESS = {key: value for key, value in QUANTISED.items() if key != "quant_method"}


@pytest.fixture(params=[True, False], ids=["preset", "stock"])
def refused(request, refusal, engine_args):
    """`refused(**fields)`: the one line, with the preset asked for and without it."""

    def without_preset(**fields: Any) -> str:
        with pytest.raises(UsageError) as caught:
            engine_args(**fields).create_engine_config()
        assert str(caught.value).splitlines() == [str(caught.value)]
        return str(caught.value)

    return refusal if request.param else without_preset


@pytest.mark.parametrize(
    ("described", "found"),
    [
        ({}, "has no quant_method"),
        (NAMELESS, "has no quant_method"),
        ({**QUANTISED, "quant_method": 5}, "has the quant_method 5"),
        ({**QUANTISED, "quant_method": None}, "has the quant_method none"),
        ({**QUANTISED, "quant_method": ""}, "has the quant_method ''"),
        ([], "is []"),
        ("", "is ''"),
        (0, "is 0"),
        (False, "is false"),
    ],
    ids=str,
)
def test_with_the_quantisation_asked_for_a_malformed_description_is_one_line(refused, checkpoint, described, found):
    model = checkpoint(quantization_config=described)
    assert refused(model=model, **ONLINE) == f"model {model}: quantization_config in config.json {found}; {ALLOWED}"


@pytest.mark.parametrize(
    ("described", "found"),
    [
        ("kvcompile_w4a8", "is 'kvcompile_w4a8'"),
        (["kvcompile_w4a8"], "is ['kvcompile_w4a8']"),
        ({"quant_method": ["kvcompile_w4a8"]}, "has the quant_method ['kvcompile_w4a8']"),
        ({"name": "KVCOMPILE_W4A8"}, "has no quant_method"),
    ],
    ids=str,
)
def test_with_the_quantisation_mentioned_a_malformed_description_is_one_line(refused, checkpoint, described, found):
    model = checkpoint(quantization_config=described)
    assert refused(model=model) == f"model {model}: quantization_config in config.json {found}; {ALLOWED}"


@pytest.mark.parametrize(
    ("described", "found"),
    [
        ([1], "is [1]"),
        ([], "is []"),
        ("fp8", "is 'fp8'"),
        (0, "is 0"),
        (False, "is false"),
        ({"quant_method": None}, "has the quant_method none"),
        ({"quant_method": 5}, "has the quant_method 5"),
        ({"quant_method": ["x"]}, "has the quant_method ['x']"),
    ],
    ids=str,
)
def test_with_the_preset_alone_a_malformed_description_is_one_line(refusal, checkpoint, described, found):
    model = checkpoint(quantization_config=described)
    assert refusal(model=model) == (
        f"model {model}: quantization_config in config.json {found}; allowed is a table whose quant_method is a name, "
        "or none at all for a checkpoint that is not quantised; get the checkpoint again"
    )


@pytest.mark.parametrize("described", [{}, {"bits": 4}, {"quant_method": ""}], ids=str)
def test_with_the_preset_alone_what_vllm_takes_for_unquantised_is_served(build, checkpoint, described):
    assert build(model=checkpoint(quantization_config=described)).quant_config is None


def test_a_long_description_is_cut_short(refusal, checkpoint):
    line = refusal(model=checkpoint(quantization_config=[QUANTISED]))
    assert "quantization_config in config.json is [{'quant_method': 'kvcompile_w4a8', " in line
    assert "...; allowed is a table" in line


@pytest.mark.parametrize("asked", [True, False])
def test_null_is_an_unquantised_checkpoint(build, engine_args, checkpoint, asked):
    make = build if asked else lambda **f: engine_args(**f).create_engine_config()
    assert make(model=checkpoint(quantization_config=None), **ONLINE).quant_config.group_sizes is None


@pytest.mark.parametrize(
    ("described", "fields"),
    [
        (QUANTISED, {}),
        (QUANTISED, ONLINE),
        ({"quant_method": "fp8"}, ONLINE),
        (None, ONLINE),
        ([], {}),
        ({"quant_method": 5}, {}),
        ("fp8", {"quantization": "fp8"}),
    ],
    ids=str,
)
def test_everything_else_is_left_to_vllm(engine_args, checkpoint, described, fields):
    checks.refuse_malformed_description(engine_args(model=checkpoint(quantization_config=described), **fields))


@pytest.mark.parametrize("text", ["{", "[1]", "\u00ff"])
def test_a_config_that_is_no_table_is_left_to_vllm(engine_args, checkpoint, text):
    folder = checkpoint()
    (folder / "config.json").write_text(text, encoding="latin-1")
    checks.refuse_malformed_description(engine_args(model=folder, **ONLINE))


def test_a_model_that_is_not_on_this_machine_is_left_to_vllm(monkeypatch):
    for model in ("someone/some-model", "s3://bucket/folder/model"):
        monkeypatch.setattr(EngineArgs, "__post_init__", lambda self: None)
        checks.refuse_malformed_description(EngineArgs(model=model, **ONLINE))


def test_a_config_from_another_folder_is_the_one_that_is_judged(refusal, checkpoint, llama):
    other = checkpoint(quantization_config=[])
    line = refusal(model=llama, hf_config_path=str(other), **ONLINE)
    assert line.startswith(f"model {llama}: quantization_config in config.json is []; ")


# --- values that Python would take for others -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [True, 1.0])
def test_what_only_equals_the_format_is_refused(refusal, checkpoint, version):
    line = refusal(model=checkpoint(quantization_config={**QUANTISED, "format": version}))
    assert line.startswith(f"quantization_config: format is {version!r}; this version of kvcompile reads 1; ")


@pytest.mark.parametrize("group", [64.9, 64.0, True, "64"])
def test_a_group_is_a_whole_number(refusal, checkpoint, group):
    line = refusal(model=checkpoint(quantization_config={**QUANTISED, "group_sizes": {"128": group, "256": 64}}))
    assert line == (
        f"quantization_config: group_sizes has '128': {group!r}: allowed is a whole number or \"channel\"; quantise it "
        "anew with `kvcompile quantize`"
    )


@pytest.mark.parametrize("group", [64.9, True, "64", [64]])
def test_so_is_the_group_that_was_asked_for(refusal, checkpoint, group):
    line = refusal(model=checkpoint(quantization_config={**QUANTISED, "group_size": group}))
    assert line.startswith(f'quantization_config: group_size is {group!r}; allowed is a whole number or "channel"; ')


@pytest.mark.parametrize("group", [64, "channel", None])
def test_the_group_that_was_asked_for_may_be(group):
    assert W4A8Config.from_config({**QUANTISED, "group_size": group}).group_sizes == {128: 128, 256: 64}


# --- part of a merged linear ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "layer", "found", "merged"),
    [
        (["self_attn.q_proj"], "self_attn.qkv_proj", "q_proj", "q_proj, k_proj, v_proj"),
        (["self_attn.v_proj", "self_attn.q_proj"], "self_attn.qkv_proj", "q_proj, v_proj", "q_proj, k_proj, v_proj"),
        (["mlp.up_proj"], "mlp.gate_up_proj", "up_proj", "gate_proj, up_proj"),
    ],
)
def test_leaving_out_a_part_of_a_merged_linear_is_one_line(refusal, checkpoint, skipped, layer, found, merged):
    said = (
        f"layer model.layers.1.{layer}: modules_to_not_convert has {found} of it alone; vLLM merges {merged}, so "
        "allowed are all of them or none; quantise it anew with `kvcompile quantize`"
    )
    names = [f"model.layers.1.{name}" for name in skipped]
    assert refusal(model=checkpoint(quantization_config={**QUANTISED, "modules_to_not_convert": names})) == said
    config = W4A8Config({128: 128}, tuple(names))
    config.packed_modules_mapping = PARTS
    with set_current_vllm_config(VllmConfig()), pytest.raises(UsageError) as caught:
        config.skips(f"model.layers.1.{layer}")
    assert str(caught.value) == said


def test_leaving_out_all_parts_of_a_merged_linear_is_served(build, checkpoint):
    names = [f"model.layers.1.self_attn.{part}" for part in PARTS["qkv_proj"]]
    config = build(model=checkpoint(quantization_config={**QUANTISED, "modules_to_not_convert": names}))
    assert config.quant_config.skipped == names


@pytest.mark.parametrize(
    "name",
    [
        "q_proj",
        "layers.0.mlp.down_proj",
        "model.layers.2.mlp.down_proj",
        "model.layers.01.mlp.down_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp",
        "",
    ],
)
def test_a_name_that_is_of_no_linear_is_refused(refused, checkpoint, name):
    model = checkpoint(quantization_config={**QUANTISED, "modules_to_not_convert": ["lm_head", name]})
    assert refused(model=model) == (
        f"quantization_config: modules_to_not_convert has {name!r}, which names no linear of this model of 2 layers; "
        "allowed are full names, such as model.layers.0.mlp.down_proj; quantise it anew with `kvcompile quantize`"
    )


def test_the_head_and_the_embeddings_may_be_named(build, checkpoint):
    names = ["lm_head", "model.embed_tokens"]
    config = build(model=checkpoint(quantization_config={**QUANTISED, "modules_to_not_convert": names}))
    assert config.quant_config.skipped == names


# --- a width that no group fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "layer", "width"),
    [
        ({"intermediate_size": 200}, "down_proj", 200),
        ({"hidden_size": 136}, "qkv_proj", 136),
        ({"head_dim": 36}, "o_proj", 72),
    ],
)
def test_an_illegal_width_that_would_be_quantised_while_loading_is_one_line(refused, checkpoint, changes, layer, width):
    off = {} if "head_dim" not in changes else {"kv_cache_dtype": "auto"}
    assert refused(model=checkpoint(**changes), **ONLINE, **off) == (
        f"layer {layer}: in_features is {width}; allowed are positive multiples of 16; serve the checkpoint without "
        "kvcompile_w4a8"
    )
