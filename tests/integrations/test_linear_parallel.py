"""W4A8 layers of vLLM over several tensor-parallel ranks: what each holds and computes."""

from __future__ import annotations

import pytest
import torch

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import W4A8Weight
from tests.integrations.w4a8_layers import (
    HEAD,
    KINDS,
    assert_same,
    config_of,
    expected,
    inputs,
    int8_weight,
    layer_of,
    loaded,
    plain_weight,
    rank,
)


@pytest.mark.parametrize("name", ["gate_up_proj", "column"])
def test_two_ranks_hold_and_compute_the_halves_of_each_part(name):
    width, sizes = KINDS[name]
    _, whole = loaded(name)
    shards = [loaded(name, number, 2)[0] for number in (0, 1)]
    x = inputs(5, width)
    y = loaded(name)[0](x)[0].split(sizes, dim=1)
    halves = [shard.quant_method.apply(shard, x).split([n // 2 for n in sizes], dim=1) for shard in shards]
    for part, (left, right) in zip(y, zip(*halves, strict=True), strict=True):
        assert torch.equal(torch.cat((left, right), dim=1), part)
    start = 0
    rows = [[], []]
    for size in sizes:
        for number in (0, 1):
            rows[number] += range(start + number * size // 2, start + (number + 1) * size // 2)
        start += size
    for shard, wanted in zip(shards, rows, strict=True):
        assert_same(plain_weight(shard, width), W4A8Weight(*(tensor[wanted] for tensor in whole)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_query_heads_are_shared_out_and_scarce_kv_heads_are_repeated(ranks):
    width, sizes = KINDS["qkv_proj"]
    _, whole = loaded("qkv_proj")
    for number in range(ranks):
        shard, _ = loaded("qkv_proj", number, ranks)
        own = 4 // ranks
        kv_head = number if ranks == 2 else number // 2
        heads = [*range(number * own, (number + 1) * own), 4 + kv_head, 6 + kv_head]
        rows = [row for head in heads for row in range(head * HEAD, (head + 1) * HEAD)]
        assert_same(plain_weight(shard, width), W4A8Weight(*(tensor[rows] for tensor in whole)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_parallel_layer_is_cut_along_its_input_between_groups(ranks):
    _, whole = loaded("down_proj")
    shards = [plain_weight(loaded("down_proj", number, ranks)[0], 512 // ranks) for number in range(ranks)]
    joined = [torch.cat([shard[i] for shard in shards], dim=1) for i in range(3)]
    assert_same(W4A8Weight(*joined, shards[0].channel_scales), whole)
    assert all(torch.equal(shard.channel_scales, whole.channel_scales) for shard in shards)


def test_the_partial_sums_of_row_parallel_ranks_add_up():
    x = inputs(5, 512, torch.float32)
    whole = loaded("down_proj")[1]
    for number in (0, 1):
        shard, _ = loaded("down_proj", number, 2)
        own = slice(number * 256, (number + 1) * 256)
        y = shard.quant_method.apply(shard, x[:, own])
        assert torch.equal(y, expected(x[:, own], int8_weight(whole)[:, own], whole.channel_scales))


def test_one_group_per_row_is_cut_anywhere_and_every_rank_has_its_scales():
    _, whole = loaded("down_proj", group=512)
    shards = [loaded("down_proj", number, 2, group=512)[0] for number in (0, 1)]
    for number, shard in enumerate(shards):
        plain = plain_weight(shard, 256)
        assert torch.equal(int8_weight(plain), int8_weight(whole)[:, number * 256 : (number + 1) * 256])


def test_a_group_that_straddles_two_ranks_is_refused_with_both_numbers_and_what_to_do():
    with rank(0, 4), pytest.raises(UsageError) as caught:
        layer_of("down_proj", 768, [64], config_of(768, 128))
    assert str(caught.value) == (
        "layer model.layers.3.block.down_proj: groups of 128 do not divide the 192 input channels of one rank (768 "
        "over 4 ranks); choose a --tensor-parallel-size that divides 6, or quantise with a group size that divides 192"
    )
