"""What a W4A8 checkpoint may have wrong in a layer: refused by name while it loads."""

from __future__ import annotations

import pytest
import torch

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import W4A8Weight
from tests.integrations.w4a8_layers import (
    GROUPS,
    KINDS,
    checkpoint_of,
    config_of,
    finish,
    layer_of,
    load,
    rank,
    weights,
)


def _tensors(name: str = "qkv_proj") -> dict[str, dict[str, torch.Tensor]]:
    width, sizes = KINDS[name]
    return checkpoint_of(weights(name, width, sizes), GROUPS[width])


def _refused(tensors: dict[str, dict[str, torch.Tensor]], name: str = "qkv_proj") -> str:
    width, sizes = KINDS[name]
    with rank(0, 1), pytest.raises(UsageError) as caught:
        layer = layer_of(name, width, sizes, config_of(width, GROUPS[width]))
        load(layer, name, tensors)
        finish(layer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tensor", W4A8Weight._fields)
@pytest.mark.parametrize(("name", "part"), [("qkv_proj", "k_proj"), ("gate_up_proj", "up_proj"), ("down_proj", "")])
def test_a_missing_tensor_is_named_as_the_checkpoint_would_have_it(name, part, tensor):
    tensors = _tensors(name)
    del tensors[part or "down_proj"][tensor]
    assert _refused(tensors, name) == (
        f"the checkpoint has no tensor model.layers.3.block.{part or 'down_proj'}.{tensor}; it is incomplete, quantise "
        "or copy it anew"
    )


def test_a_value_outside_int8_is_refused_with_the_layer():
    tensors = _tensors()
    tensors["v_proj"]["group_scales"][5, 1] = 40
    tensors["v_proj"]["group_zeros"][5, 1] = 0
    tensors["v_proj"]["qweight"][5, 64:] = 0xFF
    assert _refused(tensors) == (
        "layer model.layers.3.block.qkv_proj: in rows 0 to 511: row 389, group 1 rebuilds to 600..600; allowed is "
        "-128..127; the checkpoint is damaged, make it anew"
    )


@pytest.mark.parametrize(
    ("tensor", "change", "says"),
    [
        ("group_scales", lambda t: t[:, :1], "is torch.uint8 [128, 1]; by the checkpoint's config.json it is"),
        ("group_zeros", lambda t: t.to(torch.int8), "is torch.int8 [128, 2]; by the checkpoint's config.json it is"),
        ("qweight", lambda t: t[:, :100], "is torch.uint8 [128, 100]; by the checkpoint's config.json it is"),
        ("channel_scales", lambda t: t.half(), "is torch.float16 [128]; by the checkpoint's config.json it is"),
        ("channel_scales", lambda t: t[:, None], "is torch.float32 [128, 1]; by the checkpoint's config.json it is"),
    ],
)
def test_a_part_that_is_not_as_the_configuration_says_is_refused_by_its_name(tensor, change, says):
    tensors = _tensors()
    tensors["k_proj"][tensor] = change(tensors["k_proj"][tensor])
    assert _refused(tensors).startswith(f"tensor model.layers.3.block.k_proj.{tensor} {says}")
