"""What a W4A8 layer of vLLM holds once it is loaded, when it is made ready, and how it is loaded again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

from kvcompile.integrations.vllm import linear
from kvcompile.ops.w4a8 import cuda, pack
from tests.integrations.w4a8_layers import (
    GROUPS,
    KINDS,
    checkpoint_of,
    config_of,
    finish,
    layer_of,
    load,
    loaded,
    rank,
    weights,
)


@pytest.mark.parametrize("name", KINDS)
def test_after_loading_a_layer_holds_its_weight_once(name):
    width, sizes = KINDS[name]
    layer, _ = loaded(name)
    rows, groups = sum(sizes), width // GROUPS[width]
    assert {n for n, _ in layer.named_parameters()} == {"tiles", "group_params", "channel_scales"}
    assert all(type(p) is torch.nn.Parameter and not p.requires_grad for p in layer.parameters())
    tile_rows = -(-rows // 16)
    bytes_held = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    assert bytes_held == tile_rows * 16 * width // 2 + tile_rows * groups * 32 + rows * 4
    held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert held == []


def test_a_large_layer_is_packed_in_pieces_with_the_same_result(monkeypatch):
    whole, _ = loaded("qkv_proj")
    monkeypatch.setattr("kvcompile.integrations.vllm.linear._ELEMENTS_AT_ONCE", 50 * 256)
    pieces, _ = loaded("qkv_proj")
    assert torch.equal(pieces.tiles, whole.tiles)
    assert torch.equal(pieces.group_params, whole.group_params)
    assert torch.equal(pieces.channel_scales, whole.channel_scales)


@pytest.mark.parametrize(("name", "ranks", "groups"), [("qkv_proj", 1, 2), ("down_proj", 2, 2)])
def test_a_layer_is_made_ready_once_after_its_last_piece(monkeypatch, name, ranks, groups):
    done: list[object] = []
    monkeypatch.setattr(linear, "_ELEMENTS_AT_ONCE", 16 * 256)
    monkeypatch.setattr(linear, "pack", lambda weight: done.append("pack") or pack(weight))
    monkeypatch.setattr(linear, "_make_ready", lambda packed, *rest: done.append(([t.shape for t in packed], *rest)))
    layer, _ = loaded(name, ranks - 1, ranks)
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
    layer, _ = loaded("column")
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
