"""`--quantization kvcompile_w4a8` on a plain checkpoint: each layer is rounded to W4A8 as soon as it is complete."""

from __future__ import annotations

import pytest
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import quantize, unpack
from tests.integrations.w4a8_layers import (
    HEAD,
    PARTS,
    SHARDS,
    LargestFloats,
    config_of,
    finish,
    layer_of,
    load,
    rank,
    weights,
)

SIZES = [4 * HEAD, 2 * HEAD, 2 * HEAD]
PARAMETERS = {"tiles", "group_params", "channel_scales"}


def _names(layer: torch.nn.Module) -> set[str]:
    return {name for name, _ in layer.named_parameters()}


def _float_tensors(name: str, width: int, sizes: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    return {part: {"weight": weight} for part, weight in weights(name, width, sizes).items()}


def test_the_weight_is_on_no_device_before_its_last_part_comes_and_packed_right_after():
    tensors = _float_tensors("qkv_proj", 256, SIZES)
    with rank(0, 1):
        layer = layer_of("qkv_proj", 256, SIZES, config_of(256, None))
        assert layer.weight.is_meta
        last = tensors.popitem()
        load(layer, "qkv_proj", tensors)
        assert layer.weight.is_meta
        load(layer, "qkv_proj", dict([last]))
        assert _names(layer) == PARAMETERS
        before = [id(p) for p in layer.parameters()]
        finish(layer)  # vLLM calls it for every layer at the end
    assert [id(p) for p in layer.parameters()] == before


@pytest.mark.parametrize("order", [["q_proj", "k_proj", "v_proj"], ["v_proj", "q_proj", "k_proj"]])
def test_the_merged_weight_is_the_rounded_one_whatever_the_order_of_its_parts(order):
    tensors = _float_tensors("qkv_proj", 256, SIZES)
    with rank(0, 1):
        layer = layer_of("qkv_proj", 256, SIZES, config_of(256, None))
        for part in order:
            load(layer, "qkv_proj", {part: tensors[part]})
    merged = torch.cat([tensors[part]["weight"] for part in PARTS["qkv_proj"]])
    wanted = quantize(merged, 128)
    assert torch.equal(layer.channel_scales, wanted.channel_scales)
    for given, same in zip(unpack(layer.tiles, layer.group_params, *merged.shape), wanted[:3], strict=True):
        assert torch.equal(given, same)


def test_a_bias_loads_beside_it():
    tensors = _float_tensors("qkv_proj", 256, SIZES)
    bias = {part: torch.randn(n).bfloat16() for part, n in zip(PARTS["qkv_proj"], SIZES, strict=True)}
    with rank(0, 1):
        layer = layer_of("qkv_proj", 256, SIZES, config_of(256, None), bias=True)
        for part, named in tensors.items():
            load(layer, "qkv_proj", {part: named})
            layer.bias.weight_loader(layer.bias, bias[part], SHARDS[part])
    assert _names(layer) == PARAMETERS | {"bias"}
    assert torch.equal(layer.bias, torch.cat(list(bias.values())))


@pytest.mark.parametrize(
    ("width", "ranks", "group"), [(512, 1, 128), (192, 1, 64), (512, 4, 128), (384, 2, 64), (80, 1, 80)]
)
def test_the_group_fits_what_one_rank_has(width, ranks, group):
    (weight,) = weights("down_proj", width, [48]).values()
    with rank(ranks - 1, ranks):
        layer = layer_of("down_proj", width, [48], config_of(width, None))
        load(layer, "down_proj", {"down_proj": {"weight": weight}})
    own = width // ranks
    wanted = quantize(weight[:, (ranks - 1) * own :], group)
    assert layer.group_params.shape[1] == own // group
    for given, same in zip(unpack(layer.tiles, layer.group_params, 48, own), wanted[:3], strict=True):
        assert torch.equal(given, same)


def test_a_width_that_no_group_fits_is_refused_with_the_layer():
    with rank(0, 1), pytest.raises(UsageError) as caught:
        layer_of("down_proj", 72, [48], config_of(72, None))
    assert str(caught.value) == (
        "layer model.layers.3.block.down_proj: in_features is 72; allowed are positive multiples of 16; serve the "
        "checkpoint without kvcompile_w4a8"
    )


@pytest.mark.parametrize("given", [{}, {"q_proj", "v_proj"}])
def test_a_missing_part_is_named_when_vllm_finishes(given):
    tensors = {part: named for part, named in _float_tensors("qkv_proj", 256, SIZES).items() if part in given}
    missing = "k_proj" if given else "q_proj"
    with rank(0, 1), pytest.raises(UsageError, match=rf"has no tensor model\.layers\.3\.block\.{missing}\.weight[;,]"):
        layer = layer_of("qkv_proj", 256, SIZES, config_of(256, None))
        load(layer, "qkv_proj", tensors)
        finalize_layerwise_processing(layer, ModelConfig.__new__(ModelConfig))


def test_an_integer_weight_is_refused():
    with rank(0, 1), pytest.raises(UsageError, match=r"^tensor .*\.down_proj\.weight is torch.int8 \[48, 256\]; "):
        layer = layer_of("down_proj", 256, [48], config_of(256, None))
        load(layer, "down_proj", {"down_proj": {"weight": torch.ones(48, 256, dtype=torch.int8)}})


def test_a_weight_that_is_not_finite_is_refused_with_the_layer():
    (weight,) = weights("down_proj", 256, [48]).values()
    weight[7, 9] = torch.inf
    with rank(0, 1), pytest.raises(UsageError) as caught:
        layer = layer_of("down_proj", 256, [48], config_of(256, None))
        load(layer, "down_proj", {"down_proj": {"weight": weight}})
    assert str(caught.value) == (
        "layer model.layers.3.block.down_proj: in rows 0 to 47: weight is not finite in row 7; the checkpoint is "
        "damaged, make it anew"
    )


def test_made_up_weights_are_rounded_too():
    config = VllmConfig(load_config=LoadConfig(load_format="dummy"))
    with rank(0, 1, config):
        layer = layer_of("down_proj", 256, [48], config_of(256, None))
        DummyModelLoader(config.load_config).load_weights(layer, None)
    assert _names(layer) == PARAMETERS


def test_the_memory_that_quantising_takes_does_not_grow_with_the_layer(monkeypatch):
    monkeypatch.setattr("kvcompile.integrations.vllm.linear._ELEMENTS_AT_ONCE", 64 * 256)
    (weight,) = weights("down_proj", 256, [4096]).values()

    with rank(0, 1):
        layer = layer_of("down_proj", 256, [4096], config_of(256, None))
        with LargestFloats() as largest:
            load(layer, "down_proj", {"down_proj": {"weight": weight}})
    assert 0 < largest.seen <= 64 * 256
