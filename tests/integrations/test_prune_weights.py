"""The weights of output projections as their layers compute with them: unquantised and W4A8, of one rank of several."""

from __future__ import annotations

import pytest
import torch

from kvcompile.integrations.vllm.prune_weights import output_weights
from tests.integrations.w4a8_layers import KINDS, finish, int8_weight, layer_of, load, loaded, rank, weights

NAME = "model.layers.3.self_attn"
WIDTH, SIZES = KINDS["down_proj"]


def taken(projection: torch.nn.Module) -> torch.Tensor:
    """What is found for the attention layer beside this projection."""
    model = torch.nn.Module()
    part = model
    for name in NAME.split("."):
        part.add_module(name, torch.nn.Module())
        part = part.get_submodule(name)
    part.add_module("o_proj", projection)
    (weight,) = output_weights(model, [f"{NAME}.attn"]).values()
    return weight


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 2)])
def test_of_an_unquantised_layer_it_is_what_was_loaded_though_vllm_has_packed_it(number: int, ranks: int) -> None:
    floats = weights("down_proj", WIDTH, SIZES)["down_proj"]
    with rank(number, ranks):
        layer = layer_of("down_proj", WIDTH, SIZES, None)
        load(layer, "down_proj", {"down_proj": {"weight": floats}})
        layer = finish(layer)
    columns = WIDTH // ranks
    assert torch.equal(taken(layer), floats[:, number * columns : (number + 1) * columns])


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 2)])
def test_of_a_w4a8_layer_it_is_the_dequantised_weight(number: int, ranks: int) -> None:
    layer, whole = loaded("down_proj", number, ranks)
    columns = WIDTH // ranks
    expected = int8_weight(whole).float() * whole.channel_scales.view(-1, 1)
    expected = expected[:, number * columns : (number + 1) * columns]
    torch.testing.assert_close(taken(layer).float(), expected, rtol=2**-8, atol=0)  # rounded to bf16, once
