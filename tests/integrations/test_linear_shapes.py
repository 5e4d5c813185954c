"""A tensor whose rows or columns are not those of the model is refused, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from kvcompile.config import UsageError
from kvcompile.integrations.vllm.linear_loading import part_rows
from kvcompile.ops.w4a8 import W4A8Weight
from tests.integrations.w4a8_layers import (
    HEAD,
    PARTS,
    checkpoint_of,
    config_of,
    finish,
    layer_of,
    load,
    rank,
    weights,
)

# name -> input channels, output channels of the parts, group size
KINDS: dict[str, tuple[int, list[int], int]] = {
    "qkv_proj": (256, [4 * HEAD, 2 * HEAD, 2 * HEAD], 128),
    "gate_up_proj": (256, [208, 208], 128),
    "column": (192, [80], 64),
    "down_proj": (512, [72], 128),
}
# layer, part, and its rows in the model over all ranks
PART_ROWS = [
    ("qkv_proj", "q_proj", 256),
    ("qkv_proj", "k_proj", 128),
    ("qkv_proj", "v_proj", 128),
    ("gate_up_proj", "gate_proj", 208),
    ("gate_up_proj", "up_proj", 208),
    ("column", "column", 80),
    ("down_proj", "down_proj", 72),
]
# 4 ranks: 2 KV heads, each on two of them
RANKS = [(0, 1), (1, 2), (3, 4)]

Change = Callable[[torch.Tensor], torch.Tensor]


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, tensor))


def _one_less(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def _refused(name: str, part: str, tensors: list[str], change: Change, number: int, ranks: int, online: bool) -> str:
    width, sizes, group = KINDS[name]
    floats = weights(name, width, sizes)
    checkpoint = {p: {"weight": w} for p, w in floats.items()} if online else checkpoint_of(floats, group)
    for tensor in tensors:
        checkpoint[part][tensor] = change(checkpoint[part][tensor])
    with rank(number, ranks), pytest.raises(UsageError) as caught:
        layer = layer_of(name, width, sizes, config_of(width, None if online else group))
        load(layer, name, checkpoint)
        finish(layer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("number", "ranks"), RANKS)
@pytest.mark.parametrize(("change", "rows_of"), [(_doubled, lambda n: 2 * n), (_one_less, lambda n: n - 1)])
@pytest.mark.parametrize(("name", "part", "rows"), PART_ROWS)
def test_a_part_with_other_rows_than_the_model_is_refused_with_both_numbers(
    name, part, rows, change, rows_of, number, ranks
):
    said = _refused(name, part, list(W4A8Weight._fields), change, number, ranks, online=False)
    bytes_wide = KINDS[name][0] // 2
    assert said == (
        f"tensor model.layers.3.block.{part}.qweight is torch.uint8 [{rows_of(rows)}, {bytes_wide}]; by the "
        f"checkpoint's config.json it is torch.uint8 [{rows}, {bytes_wide}]; the two do not belong together, quantise "
        "the model anew"
    )


@pytest.mark.parametrize("tensor", W4A8Weight._fields)
@pytest.mark.parametrize("change", [_doubled, _one_less])
def test_each_tensor_is_looked_at(tensor, change):
    said = _refused("qkv_proj", "k_proj", [tensor], change, 0, 1, online=False)
    assert said.startswith(f"tensor model.layers.3.block.k_proj.{tensor} is torch.")


@pytest.mark.parametrize(("number", "ranks"), RANKS)
@pytest.mark.parametrize(("change", "rows_of"), [(_doubled, lambda n: 2 * n), (_one_less, lambda n: n - 1)])
@pytest.mark.parametrize(("name", "part", "rows"), PART_ROWS)
def test_so_is_a_weight_that_is_quantised_while_it_loads(name, part, rows, change, rows_of, number, ranks):
    said = _refused(name, part, ["weight"], change, number, ranks, online=True)
    width = KINDS[name][0]
    assert said == (
        f"tensor model.layers.3.block.{part}.weight is torch.bfloat16 [{rows_of(rows)}, {width}]; by the checkpoint's "
        f"config.json it is of a float type [{rows}, {width}]; the two do not belong together, quantise the model anew"
    )


@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_that_has_merged_the_parts_itself_has_the_rows_of_all(name):
    width, sizes, group = KINDS[name]
    parts = checkpoint_of(weights(name, width, sizes), group)
    merged = {field: torch.cat([part[field] for part in parts.values()]) for field in W4A8Weight._fields}
    with rank(0, 1):
        apart, whole = (layer_of(name, width, sizes, config_of(width, group)) for _ in range(2))
        load(apart, name, parts)
        for field, tensor in merged.items():
            parameter = getattr(whole, field)
            parameter.weight_loader(parameter, tensor)
        assert torch.equal(finish(whole).tiles, finish(apart).tiles)
        wrong = layer_of(name, width, sizes, config_of(width, group))
        with pytest.raises(UsageError) as caught:
            wrong.qweight.weight_loader(wrong.qweight, merged["qweight"][:-2])
    assert str(caught.value).startswith(
        f"tensor model.layers.3.block.{name}.qweight is torch.uint8 [{sum(sizes) - 2}, 128]; by the checkpoint's "
        f"config.json it is torch.uint8 [{sum(sizes)}, 128]; "
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_rows_of_a_layer_do_not_depend_on_the_ranks(ranks):
    with rank(0, ranks):
        qkv = QKVParallelLinear(256, HEAD, 8, 2, bias=False, v_head_size=32)
        gate_up = MergedColumnParallelLinear(256, [64, 128], bias=False)
        row = layer_of("down_proj", 512, [72], None)
    assert part_rows(qkv) == [512, 128, 64]
    assert part_rows(gate_up) == [64, 128]
    assert part_rows(row) == [72]
