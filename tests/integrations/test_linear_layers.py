"""What a W4A8 layer of vLLM computes on one rank."""

from __future__ import annotations

import pytest
import torch
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, ReplicatedLinear

from tests.integrations.w4a8_layers import (
    KINDS,
    checkpoint_of,
    config_of,
    expected,
    finish,
    inputs,
    int8_weight,
    layer_of,
    load,
    loaded,
    rank,
    weights,
    whole_weight,
)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_a_layer_computes_the_int8_product_of_its_checkpoint(name, tokens):
    layer, whole = loaded(name)
    x = inputs(tokens, KINDS[name][0])
    y, bias = layer(x)
    assert bias is None
    assert torch.equal(y, expected(x, int8_weight(whole), whole.channel_scales))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_result_has_the_dtype_of_the_input(dtype):
    layer, whole = loaded("gate_up_proj")
    x = inputs(5, 256, dtype)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_a_batch_in_three_dimensions_is_a_batch_of_all_its_tokens():
    layer, _ = loaded("gate_up_proj")
    x = inputs(6, 256)
    assert torch.equal(layer(x.view(2, 3, 256))[0], layer(x)[0].view(2, 3, -1))


@pytest.mark.parametrize("shape", [(0, 256), (0, 3, 256), (2, 0, 256)])
def test_an_empty_batch_gives_an_empty_result(shape):
    layer, _ = loaded("gate_up_proj")
    y, _ = layer(torch.empty(shape, dtype=torch.bfloat16))
    assert y.shape == (*shape[:-1], 416)


def test_an_input_that_is_part_of_wider_rows_is_read_in_place():
    layer, _ = loaded("column")
    wide = inputs(4, 500)
    assert torch.equal(layer(wide[:, 100:292])[0], layer(wide[:, 100:292].clone())[0])


@pytest.mark.parametrize("name", ["qkv_proj", "down_proj"])
def test_a_bias_is_loaded_and_added(name):
    width, sizes = KINDS[name]
    layer, whole = loaded(name, bias=True)
    bias = torch.linspace(-3, 3, sum(sizes)).bfloat16()
    layer.bias.data.copy_(bias)
    x = inputs(3, width)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales, bias))


def test_one_group_per_row_is_served():
    layer, whole = loaded("down_proj", group=512)
    x = inputs(3, 512)
    assert whole.group_scales.shape == (72, 1)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_a_replicated_layer_loads_too():
    floats = weights("column", 192, [80])
    with rank(0, 2):
        layer = ReplicatedLinear(192, 80, bias=False, quant_config=config_of(192, 64), prefix="model.layers.3.x.column")
        load(layer, "column", checkpoint_of(floats, 64))
    whole = whole_weight(floats, 64)
    x = inputs(3, 192)
    assert torch.equal(finish(layer)(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_vllm_uses_the_loaders_that_know_the_parameter_classes():
    assert {"W4A8LinearMethod", "W4A8OnlineLinearMethod"} <= set(WEIGHT_LOADER_V2_SUPPORTED)


def test_weights_that_are_made_up_are_in_range_and_the_same_each_time():
    config = VllmConfig(load_config=LoadConfig(load_format="dummy"))
    with rank(0, 1, config):
        layers = [layer_of("column", 192, [80], config_of(192, 64)) for _ in range(2)]
    first, second = (finish(layer) for layer in layers)
    assert torch.equal(first.tiles, second.tiles)
    y = first(inputs(4, 192))[0].float()
    assert 0.1 < y.std() < 10
