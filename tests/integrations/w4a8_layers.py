"""Single vLLM linears, as one rank of a tensor-parallel group has them, and what they should hold and compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.ops.w4a8 import W4A8Weight, quantize, unpack

HEAD = 64
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
KINDS: dict[str, tuple[int, list[int]]] = {
    "qkv_proj": (256, [4 * HEAD, 2 * HEAD, 2 * HEAD]),
    "gate_up_proj": (256, [208, 208]),
    "column": (192, [80]),
    "down_proj": (512, [72]),
}
GROUPS = {256: 128, 192: 64, 512: 128}
SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}


def config_of(width: int, group: int | None) -> W4A8Config:
    """A checkpoint's configuration with one input width; `group` None: weights that are quantised while loading."""
    config = W4A8Config(None if group is None else {width: group})
    config.packed_modules_mapping = PARTS  # as vLLM copies it from the model class
    return config


@contextmanager
def rank(number: int, ranks: int, vllm_config: VllmConfig | None = None) -> Iterator[None]:
    """Inside, vLLM's layers believe to be rank `number` of `ranks`."""
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(vllm_config or VllmConfig()):
        for module in (linear, parameter):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: number)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        yield


def layer_of(
    name: str, width: int, sizes: list[int], config: W4A8Config | None, *, bias: bool = False, dtype: Any = None
) -> LinearBase:
    """An empty layer `model.layers.3.X.name`, `width` input channels wide; `sizes`: output channels of its parts."""
    common = {
        "bias": bias,
        "params_dtype": dtype or torch.bfloat16,
        "quant_config": config,
        "prefix": f"model.layers.3.block.{name}",
    }
    if name == "qkv_proj":
        heads, kv_heads = sizes[0] // HEAD, sizes[1] // HEAD
        return QKVParallelLinear(width, HEAD, heads, kv_heads, **common)
    if name == "gate_up_proj":
        return MergedColumnParallelLinear(width, sizes, **common)
    if name == "column":
        return ColumnParallelLinear(width, sizes[0], **common)
    return RowParallelLinear(width, sizes[0], **common)


def load(layer: LinearBase, name: str, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Load as vLLM's Llama does: each tensor of the checkpoint into the parameter that it is merged into."""
    for part, named in tensors.items():
        for tensor_name, tensor in named.items():
            parameter_ = getattr(layer, tensor_name)
            rest = (SHARDS[part],) if name in PARTS else ()
            parameter_.weight_loader(parameter_, tensor, *rest)


def finish(layer: LinearBase) -> LinearBase:
    """What vLLM does after loading."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def weights(name: str, width: int, sizes: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Part -> random weight, bf16 [N, K], with rows of different size."""
    generator = torch.Generator().manual_seed(seed)
    names = PARTS.get(name, [name])
    return {
        part: (torch.randn(n, width, generator=generator) * torch.rand(n, 1, generator=generator)).bfloat16()
        for part, n in zip(names, sizes, strict=True)
    }


def checkpoint_of(floats: Mapping[str, torch.Tensor], group: int) -> dict[str, dict[str, torch.Tensor]]:
    return {part: quantize(weight, group)._asdict() for part, weight in floats.items()}


def int8_weight(weight: W4A8Weight) -> torch.Tensor:
    """(w4 - z) * s2 by the definition of the checkpoint's format, int64 [N, K]."""
    low, high = weight.qweight & 15, weight.qweight >> 4
    codes = torch.empty(low.shape[0], 2 * low.shape[1], dtype=torch.int64)
    codes[:, 0::2], codes[:, 1::2] = low.long(), high.long()
    group = codes.shape[1] // weight.group_scales.shape[1]
    scales = weight.group_scales.long().repeat_interleave(group, 1)
    return (codes - weight.group_zeros.long().repeat_interleave(group, 1)) * scales


def expected(
    x: torch.Tensor, int8: torch.Tensor, channel_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product with int8 activations, one scale per token, in x's dtype; the sum is exact in float64."""
    largest = x.float().abs().amax(-1, keepdim=True)
    x_q = (x.float() * (127 / largest.double()).float()).round()  # in fp32, torch would round 1 / largest first
    y = (x_q.double() @ int8.double().t()).float() * (largest / 127) * channel_scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


def whole_weight(floats: dict[str, torch.Tensor], group: int) -> W4A8Weight:
    """The quantised parts on top of each other."""
    parts = [tensors.values() for tensors in checkpoint_of(floats, group).values()]
    return W4A8Weight(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def loaded(
    name: str, number: int = 0, ranks: int = 1, *, group: int | None = None, bias: bool = False
) -> tuple[LinearBase, W4A8Weight]:
    """One rank's part of the layer `name` of KINDS, and the weight over all ranks."""
    width, sizes = KINDS[name]
    group = group or GROUPS[width]
    floats = weights(name, width, sizes)
    with rank(number, ranks):
        layer = layer_of(name, width, sizes, config_of(width, group), bias=bias)
        load(layer, name, checkpoint_of(floats, group))
        return finish(layer), whole_weight(floats, group)


def plain_weight(layer: torch.nn.Module, columns: int) -> W4A8Weight:
    """What the packed parameters of a layer hold, in the checkpoint's layout."""
    rows = layer.channel_scales.shape[0]
    return W4A8Weight(*unpack(layer.tiles, layer.group_params, rows, columns), layer.channel_scales.data)


def assert_same(given: W4A8Weight, wanted: W4A8Weight) -> None:
    for name, a, b in zip(W4A8Weight._fields, given, wanted, strict=True):
        assert torch.equal(a, b), name


def inputs(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(9)).to(dtype)


class LargestFloats(TorchDispatchMode):
    """seen: the largest fp32 tensor that an operation made, in elements."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.seen = max(self.seen, result.numel())
        return result
