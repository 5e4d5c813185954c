"""What a W4A8 checkpoint's config.json may say of itself, and which layers it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, VllmConfig
from vllm.logger import _print_info_once
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from kvcompile.config import UsageError
from kvcompile.integrations.vllm.linear import W4A8LinearMethod, W4A8OnlineLinearMethod
from kvcompile.integrations.vllm.linear_config import W4A8Config
from tests.integrations.w4a8_checkpoints import QUANTISED
from tests.integrations.w4a8_layers import layer_of, rank


def _refused(**changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        W4A8Config.from_config({**QUANTISED, **changes})
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert message.startswith("quantization_config: ")
    assert "kvcompile quantize" in message
    return message


# --- reading --------------------------------------------------------------------------------------------------------


def test_the_group_of_each_input_width_is_read():
    assert W4A8Config.from_config(QUANTISED).group_sizes == {128: 128, 256: 64}
    assert W4A8Config.from_config({**QUANTISED, "group_sizes": {"80": "channel"}}).group_sizes == {80: 80}


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_is_refused_with_the_one_that_is_read(version):
    assert f"format is {version!r}; this version of kvcompile reads 1" in _refused(format=version)


@pytest.mark.parametrize("sizes", [None, {}, [128], "128"])
def test_missing_group_sizes_are_refused(sizes):
    assert f"group_sizes is {sizes!r}; allowed is a table from input width to group size" in _refused(group_sizes=sizes)


@pytest.mark.parametrize(
    ("width", "group"),
    [("128", 32), ("192", 128), ("100", "channel"), ("128", 0), ("128", -64), ("x", 64), ("128", None), ("128", "big")],
)
def test_an_illegal_group_is_refused_with_its_width(width, group):
    assert f"group_sizes has {width!r}: {group!r}: " in _refused(group_sizes={width: group})


@pytest.mark.parametrize(
    "width", [" 256", "2_56", "+256", "\u0662\u0665\u0666", "-256", "0256", "256 ", "256\n", "2" * 5000]
)
def test_a_width_is_written_in_plain_digits(width):
    said = _refused(group_sizes={width: 64})
    assert f"group_sizes has {repr(width)[:70]}" in said and len(said) < 400
    assert "allowed as a width is a positive whole number in plain digits" in said


@pytest.mark.parametrize("group", [5, -1, 0, -64, 100])
def test_the_group_that_was_asked_for_is_one_that_there_is(group):
    said = _refused(group_size=group)
    assert f'group_size is {group}; allowed is a positive multiple of 64 or "channel"' in said


@pytest.mark.parametrize("method", [5, ["rtn"], {}, True])
def test_a_method_is_a_name(method):
    assert f"method is {method!r}; allowed is the name of a method" in _refused(method=method)


@pytest.mark.parametrize(
    "changes",
    [
        {"x" * 5000: 1},
        {"a\nb": 1},
        {"act_x": "y\n" * 5000},
        {"format": "1\n" * 5000},
        {"group_sizes": "1\n" * 5000},
        {"group_sizes": {"128": "1\n" * 5000}},
        {"group_size": "1\n" * 5000},
        {"method": ["1\n" * 5000]},
        {"modules_to_not_convert": "1\n" * 5000},
    ],
)
def test_what_is_long_or_of_several_lines_is_shown_in_short(changes):
    assert len(_refused(**changes)) < 400


@pytest.mark.parametrize("names", ["lm_head", [1], {}, 0, "", False])
def test_skipped_modules_are_a_list_of_names(names):
    assert f"modules_to_not_convert is {names!r}; allowed is a list of names" in _refused(modules_to_not_convert=names)


@pytest.mark.parametrize(
    ("key", "value"),
    [("activation_symmetric", False), ("input_quant", "static"), ("activations", {"bits": 4}), ("act_order", True)],
)
def test_other_activations_are_refused_by_their_key(key, value):
    said = _refused(**{key: value})
    assert f"{key} is {value!r}; activations are int8, symmetric, with one scale per token" in said


def test_what_the_format_does_not_have_is_refused():
    assert "rotation is not known; format 1 has quant_method, format, group_size" in _refused(rotation="hadamard")


# --- layers ---------------------------------------------------------------------------------------------------------


def _method(name: str, config: W4A8Config) -> object:
    with rank(0, 1):
        return layer_of(name, 256, [128, 64, 64], config).quant_method


def test_linears_are_ours_but_for_those_that_the_checkpoint_leaves_out():
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config, online = W4A8Config({256: 64}), W4A8Config()
    for each in (config, online):
        each.packed_modules_mapping = parts
    assert type(_method("qkv_proj", config)) is W4A8LinearMethod
    assert type(_method("qkv_proj", online)) is W4A8OnlineLinearMethod
    skipped = [f"model.layers.3.block.{part}" for part in parts["qkv_proj"]]
    left = W4A8Config({256: 64}, tuple(skipped))
    left.packed_modules_mapping = parts
    assert type(_method("qkv_proj", left)) is UnquantizedLinearMethod
    assert type(_method("down_proj", left)) is W4A8LinearMethod


def test_what_is_no_linear_keeps_vllms_own_method():
    config = W4A8Config({256: 64})
    with rank(0, 1):
        embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    assert config.get_quant_method(embedding, "model.embed_tokens") is None
    assert config.get_quant_method(torch.nn.Module(), "model.layers.0.self_attn.attn") is None


def test_experts_are_refused_rather_than_left_as_they_are():
    with pytest.raises(UsageError, match=r"^layer model\.layers\.0\.mlp\.experts: W4A8 does not reach the experts"):
        W4A8Config().get_quant_method(RoutedExperts.__new__(RoutedExperts), "model.layers.0.mlp.experts")


def test_a_width_that_the_checkpoint_does_not_list_is_refused_with_those_that_it_does():
    with pytest.raises(UsageError) as caught:
        W4A8Config({128: 128, 256: 64}).group_on_rank("o_proj", 512, 1)
    assert "layer o_proj: quantization_config has no group size for an input width of 512, only for 128, 256" in str(
        caught.value
    )


def test_of_many_widths_the_first_are_told():
    with pytest.raises(UsageError) as caught:
        W4A8Config({64 * i: 64 for i in range(1, 3000)}).group_on_rank("o_proj", 80, 1)
    assert "only for 64, 128, 192, " in str(caught.value) and len(str(caught.value)) < 300


def test_lora_is_refused_without_the_preset_too():
    config = VllmConfig()
    config.lora_config = LoRAConfig(max_lora_rank=8)
    with rank(0, 1, config), pytest.raises(UsageError, match=r"^--enable-lora does not work with W4A8 weights; "):
        layer_of("down_proj", 256, [48], W4A8Config({256: 64}))


@pytest.mark.parametrize(("sizes", "ranks", "lines"), [(None, 3, 1), (None, 1, 0), ({1536: 128}, 3, 0)])
def test_results_that_depend_on_the_number_of_ranks_are_said_once(startup_lines, sizes, ranks, lines):
    _print_info_once.cache_clear()
    config = W4A8Config(sizes)
    for name in ("o_proj", "down_proj"):
        config.group_on_rank(name, 1536, ranks)
    assert startup_lines == lines * [
        "W4A8, quantised while loading: each of 3 ranks rounds its own share of o_proj and down_proj; results depend "
        "on --tensor-parallel-size"
    ]
