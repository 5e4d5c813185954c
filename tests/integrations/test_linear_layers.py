"""W4A8 layers of vLLM: what they load, merge, shard, repack and compute, one layer at a time."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, ReplicatedLinear
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import linear
from kvcompile.ops.w4a8 import W4A8Weight, cuda, pack, unpack
from tests.integrations.w4a8_layers import (
    HEAD,
    checkpoint_of,
    config_of,
    expected,
    finish,
    int8_weight,
    layer_of,
    load,
    rank,
    weights,
)

KINDS: dict[str, tuple[int, list[int]]] = {
    "qkv_proj": (256, [4 * HEAD, 2 * HEAD, 2 * HEAD]),
    "gate_up_proj": (256, [208, 208]),
    "column": (192, [80]),
    "down_proj": (512, [72]),
}
GROUPS = {256: 128, 192: 64, 512: 128}


def _whole(floats: dict[str, torch.Tensor], group: int) -> W4A8Weight:
    """The quantised parts on top of each other."""
    parts = [tensors.values() for tensors in checkpoint_of(floats, group).values()]
    return W4A8Weight(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _loaded(name: str, number: int = 0, ranks: int = 1, *, group: int | None = None, bias: bool = False):
    width, sizes = KINDS[name]
    group = group or GROUPS[width]
    floats = weights(name, width, sizes)
    with rank(number, ranks):
        layer = layer_of(name, width, sizes, config_of(width, group), bias=bias)
        load(layer, name, checkpoint_of(floats, group))
        return finish(layer), _whole(floats, group)


def _plain(layer: torch.nn.Module, columns: int) -> W4A8Weight:
    """What the packed parameters of a layer hold, in the checkpoint's layout."""
    rows = layer.channel_scales.shape[0]
    return W4A8Weight(*unpack(layer.tiles, layer.group_params, rows, columns), layer.channel_scales.data)


def _assert_same(given: W4A8Weight, wanted: W4A8Weight) -> None:
    for name, a, b in zip(W4A8Weight._fields, given, wanted, strict=True):
        assert torch.equal(a, b), name


def _input(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(9)).to(dtype)


# --- one rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_a_layer_computes_the_int8_product_of_its_checkpoint(name, tokens):
    layer, whole = _loaded(name)
    x = _input(tokens, KINDS[name][0])
    y, bias = layer(x)
    assert bias is None
    assert torch.equal(y, expected(x, int8_weight(whole), whole.channel_scales))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_result_has_the_dtype_of_the_input(dtype):
    layer, whole = _loaded("gate_up_proj")
    x = _input(5, 256, dtype)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_a_batch_in_three_dimensions_is_a_batch_of_all_its_tokens():
    layer, _ = _loaded("gate_up_proj")
    x = _input(6, 256)
    assert torch.equal(layer(x.view(2, 3, 256))[0], layer(x)[0].view(2, 3, -1))


@pytest.mark.parametrize("shape", [(0, 256), (0, 3, 256), (2, 0, 256)])
def test_an_empty_batch_gives_an_empty_result(shape):
    layer, _ = _loaded("gate_up_proj")
    y, _ = layer(torch.empty(shape, dtype=torch.bfloat16))
    assert y.shape == (*shape[:-1], 416)


def test_an_input_that_is_part_of_wider_rows_is_read_in_place():
    layer, _ = _loaded("column")
    wide = _input(4, 500)
    assert torch.equal(layer(wide[:, 100:292])[0], layer(wide[:, 100:292].clone())[0])


@pytest.mark.parametrize("name", ["qkv_proj", "down_proj"])
def test_a_bias_is_loaded_and_added(name):
    width, sizes = KINDS[name]
    layer, whole = _loaded(name, bias=True)
    bias = torch.linspace(-3, 3, sum(sizes)).bfloat16()
    layer.bias.data.copy_(bias)
    x = _input(3, width)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales, bias))


def test_one_group_per_row_is_served():
    layer, whole = _loaded("down_proj", group=512)
    x = _input(3, 512)
    assert whole.group_scales.shape == (72, 1)
    assert torch.equal(layer(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_a_replicated_layer_loads_too():
    floats = weights("column", 192, [80])
    with rank(0, 2):
        layer = ReplicatedLinear(192, 80, bias=False, quant_config=config_of(192, 64), prefix="model.layers.3.x.column")
        load(layer, "column", checkpoint_of(floats, 64))
    whole = _whole(floats, 64)
    x = _input(3, 192)
    assert torch.equal(finish(layer)(x)[0], expected(x, int8_weight(whole), whole.channel_scales))


def test_vllm_uses_the_loaders_that_know_the_parameter_classes():
    assert {"W4A8LinearMethod", "W4A8OnlineLinearMethod"} <= set(WEIGHT_LOADER_V2_SUPPORTED)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_after_loading_a_layer_holds_its_weight_once(name):
    width, sizes = KINDS[name]
    layer, _ = _loaded(name)
    rows, groups = sum(sizes), width // GROUPS[width]
    assert {n for n, _ in layer.named_parameters()} == {"tiles", "group_params", "channel_scales"}
    assert all(type(p) is torch.nn.Parameter and not p.requires_grad for p in layer.parameters())
    tile_rows = -(-rows // 16)
    bytes_held = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    assert bytes_held == tile_rows * 16 * width // 2 + tile_rows * groups * 32 + rows * 4
    held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert held == []


def test_a_large_layer_is_packed_in_pieces_with_the_same_result(monkeypatch):
    whole, _ = _loaded("qkv_proj")
    monkeypatch.setattr("kvcompile.integrations.vllm.linear._ELEMENTS_AT_ONCE", 50 * 256)
    pieces, _ = _loaded("qkv_proj")
    assert torch.equal(pieces.tiles, whole.tiles)
    assert torch.equal(pieces.group_params, whole.group_params)
    assert torch.equal(pieces.channel_scales, whole.channel_scales)


@pytest.mark.parametrize(("name", "ranks", "groups"), [("qkv_proj", 1, 2), ("down_proj", 2, 2)])
def test_a_layer_is_made_ready_once_after_its_last_piece(monkeypatch, name, ranks, groups):
    done: list[object] = []
    monkeypatch.setattr(linear, "_ELEMENTS_AT_ONCE", 16 * 256)
    monkeypatch.setattr(linear, "pack", lambda weight: done.append("pack") or pack(weight))
    monkeypatch.setattr(linear, "_make_ready", lambda packed, *rest: done.append(([t.shape for t in packed], *rest)))
    layer, _ = _loaded(name, ranks - 1, ranks)
    shapes = [p.shape for p in (layer.tiles, layer.group_params, layer.channel_scales)]
    assert done[:-1] == ["pack"] * (len(done) - 1)
    assert len(done) > 2
    assert done[-1] == (shapes, 256, torch.bfloat16)
    assert layer.group_params.shape[1] == groups


def test_on_a_gpu_the_weight_is_waited_for_and_its_kernels_compiled(monkeypatch):
    done: list[object] = []
    device = torch.device("cuda", 1)
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: done.append(of) or stream)
    monkeypatch.setattr(cuda, "prepare", lambda *given: done.append(given))
    packed = [SimpleNamespace(device=device, shape=shape) for shape in ((5, 3, 512), (5, 3, 32), (72,))]
    linear._make_ready(tuple(packed), 192, torch.float16)
    assert done == [device, "synchronize", (device, 72, 192, 3, torch.float16)]


def test_processing_twice_changes_nothing():
    layer, _ = _loaded("column")
    before = dict(layer.named_parameters())
    finish(layer)
    assert {n: id(p) for n, p in layer.named_parameters()} == {n: id(p) for n, p in before.items()}


def test_a_deleted_layer_is_freed_although_vllm_remembers_how_to_reload_it():
    with rank(0, 1):
        layer = layer_of("column", 192, [80], config_of(192, 64))
        record_metadata_for_reloading(layer)
        load(layer, "column", checkpoint_of(weights("column", 192, [80]), 64))
        gone = weakref.ref(finish(layer))
        del layer
        gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["qkv_proj", "down_proj"])
def test_a_reload_puts_other_weights_into_the_same_memory(name):
    width, sizes = KINDS[name]
    with rank(1, 2):
        layer = layer_of(name, width, sizes, config_of(width, 128))
        record_metadata_for_reloading(layer)
        load(layer, name, checkpoint_of(weights(name, width, sizes), 128))
        before = {n: p.data_ptr() for n, p in finish(layer).named_parameters()}
        initialize_layerwise_reload(layer)
        load(layer, name, checkpoint_of(weights(name, width, sizes, seed=5), 128))
        finalize_layerwise_processing(layer, ModelConfig.__new__(ModelConfig))
        other = layer_of(name, width, sizes, config_of(width, 128))
        load(other, name, checkpoint_of(weights(name, width, sizes, seed=5), 128))
        finish(other)
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == before
    for n, parameter in other.named_parameters():
        assert torch.equal(getattr(layer, n), parameter), n


# --- tensor parallel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gate_up_proj", "column"])
def test_two_ranks_hold_and_compute_the_halves_of_each_part(name):
    width, sizes = KINDS[name]
    _, whole = _loaded(name)
    shards = [_loaded(name, number, 2)[0] for number in (0, 1)]
    x = _input(5, width)
    y = _loaded(name)[0](x)[0].split(sizes, dim=1)
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
        _assert_same(_plain(shard, width), W4A8Weight(*(tensor[wanted] for tensor in whole)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_query_heads_are_shared_out_and_scarce_kv_heads_are_repeated(ranks):
    width, sizes = KINDS["qkv_proj"]
    _, whole = _loaded("qkv_proj")
    for number in range(ranks):
        shard, _ = _loaded("qkv_proj", number, ranks)
        own = 4 // ranks
        kv_head = number if ranks == 2 else number // 2
        heads = [*range(number * own, (number + 1) * own), 4 + kv_head, 6 + kv_head]
        rows = [row for head in heads for row in range(head * HEAD, (head + 1) * HEAD)]
        _assert_same(_plain(shard, width), W4A8Weight(*(tensor[rows] for tensor in whole)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_parallel_layer_is_cut_along_its_input_between_groups(ranks):
    _, whole = _loaded("down_proj")
    shards = [_plain(_loaded("down_proj", number, ranks)[0], 512 // ranks) for number in range(ranks)]
    joined = [torch.cat([shard[i] for shard in shards], dim=1) for i in range(3)]
    _assert_same(W4A8Weight(*joined, shards[0].channel_scales), whole)
    assert all(torch.equal(shard.channel_scales, whole.channel_scales) for shard in shards)


def test_the_partial_sums_of_row_parallel_ranks_add_up():
    x = _input(5, 512, torch.float32)
    whole = _loaded("down_proj")[1]
    for number in (0, 1):
        shard, _ = _loaded("down_proj", number, 2)
        own = slice(number * 256, (number + 1) * 256)
        y = shard.quant_method.apply(shard, x[:, own])
        assert torch.equal(y, expected(x[:, own], int8_weight(whole)[:, own], whole.channel_scales))


def test_one_group_per_row_is_cut_anywhere_and_every_rank_has_its_scales():
    _, whole = _loaded("down_proj", group=512)
    shards = [_loaded("down_proj", number, 2, group=512)[0] for number in (0, 1)]
    for number, shard in enumerate(shards):
        plain = _plain(shard, 256)
        assert torch.equal(int8_weight(plain), int8_weight(whole)[:, number * 256 : (number + 1) * 256])


def test_a_group_that_straddles_two_ranks_is_refused_with_both_numbers_and_what_to_do():
    with rank(0, 4), pytest.raises(UsageError) as caught:
        layer_of("down_proj", 768, [64], config_of(768, 128))
    assert str(caught.value) == (
        "layer model.layers.3.block.down_proj: groups of 128 do not divide the 192 input channels of one rank (768 "
        "over 4 ranks); choose a --tensor-parallel-size that divides 6, or quantise with a group size that divides 192"
    )


# --- what a checkpoint may have wrong -------------------------------------------------------------------------------


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


def test_weights_that_are_made_up_are_in_range_and_the_same_each_time():
    config = VllmConfig(load_config=LoadConfig(load_format="dummy"))
    with rank(0, 1, config):
        layers = [layer_of("column", 192, [80], config_of(192, 64)) for _ in range(2)]
    first, second = (finish(layer) for layer in layers)
    assert torch.equal(first.tiles, second.tiles)
    y = first(_input(4, 192))[0].float()
    assert 0.1 < y.std() < 10
