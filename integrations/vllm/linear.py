"""W4A8 linears in vLLM: loading, sharding and repacking of weights, and the two operators that a forward calls.

A checkpoint's weights load in the plain layout, in which vLLM can cut out the part of a rank and put q, k and v, or
gate and up, on top of each other. Afterwards each layer is checked, repacked for the kernels, and its plain tensors
are dropped before the next one is touched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)

from kvcompile.config import UsageError
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.integrations.vllm.linear_loading import Arrivals, part_rows
from kvcompile.ops.act_quant import quant_per_token
from kvcompile.ops.w4a8 import W4A8Weight, pack, quantize, w4a8_linear

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tiles, group_params, channel_scales

# Elements that are checked, quantised and packed at a time: what this takes beside the weights is then small, and the
# same for a layer of any size.
_ELEMENTS_AT_ONCE = 1 << 23
_TILE_ROWS = 16  # rows that are packed together
# vLLM calls `process_weights_after_loading` once more after it has done so layer by layer; it clears this on a reload.
_DONE = "_already_called_process_weights_after_loading"


class _W4A8Linear(LinearMethodBase):
    """What both methods have in common: the packed weight, and the forward over it. One object per layer."""

    def __init__(self, config: W4A8Config, prefix: str) -> None:
        self.config = config
        self.prefix = prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: MethodType,
        **_: Any,
    ) -> None:
        """Register the parameters to load. Raises UsageError if a group would straddle two ranks."""
        ranks = input_size // input_size_per_partition
        self.group_size = self.config.group_on_rank(self.prefix, input_size, ranks)
        self.columns, self.dtype = input_size_per_partition, params_dtype
        self.made_up = get_current_vllm_config().load_config.load_format == "dummy"
        parts = self.config.packed_modules_mapping.get(self.prefix.rpartition(".")[2], ())
        self.arrivals = Arrivals(self.prefix, parts, part_rows(layer))
        rows = sum(output_partition_sizes)
        self._register(layer, rows, input_size_per_partition, input_size, params_dtype, weight_loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check and repack one layer. Raises UsageError, naming the layer, for a missing tensor or a bad value."""
        if getattr(layer, _DONE, False):
            return
        if not self.made_up:
            self.arrivals.refuse_missing()
        try:
            packed = self._packed(layer)
        except ValueError as error:
            raise UsageError(f"layer {self.prefix}: {error}; the checkpoint is damaged, make it anew") from None
        _make_ready(packed, self.columns, self.dtype)
        for name, tensor in zip(("tiles", "group_params", "channel_scales"), packed, strict=True):
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        setattr(layer, _DONE, True)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., K] of the model's dtype. Returns [..., N] of the same dtype."""
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_q, x_scale = quant_per_token(tokens)
        y = w4a8_linear(x_q, x_scale, layer.tiles, layer.group_params, layer.channel_scales, bias, x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    @abstractmethod
    def _register(
        self,
        layer: torch.nn.Module,
        rows: int,
        columns: int,
        width: int,
        dtype: torch.dtype,
        weight_loader: MethodType,
    ) -> None:
        """Register what the checkpoint has. rows, columns: of this rank; width: input channels of all ranks."""

    @abstractmethod
    def _packed(self, layer: torch.nn.Module) -> Packed:
        """The packed weight; the parameters that were loaded are gone from the layer."""


# vLLM uses the loaders that know its parameter classes only for method classes whose *names* it was told.
@register_weight_loader_v2_supported_method
class W4A8LinearMethod(_W4A8Linear):
    """A linear of a W4A8 checkpoint."""

    def _register(
        self,
        layer: torch.nn.Module,
        rows: int,
        columns: int,
        width: int,
        dtype: torch.dtype,
        weight_loader: MethodType,
    ) -> None:
        def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, wide: int | None) -> dict[str, Any]:
            loader = self.arrivals.loader(name, weight_loader, dtype, wide)
            return {"data": torch.empty(shape, dtype=dtype), "output_dim": 0, "weight_loader": loader}

        groups, all_groups = columns // self.group_size, width // self.config.group_sizes[width]
        layer.register_parameter(
            "qweight",
            PackedvLLMParameter(
                **tensor("qweight", (rows, columns // 2), torch.uint8, width // 2),
                input_dim=1,
                packed_dim=1,
                packed_factor=2,
            ),
        )
        for name in ("group_scales", "group_zeros"):
            of_group = tensor(name, (rows, groups), torch.uint8, all_groups)
            # The only group of a row is that of every rank: loaded whole, not cut along the input.
            parameter = (
                ChannelQuantScaleParameter(**of_group)
                if all_groups == 1
                else GroupQuantScaleParameter(**of_group, input_dim=1)
            )
            layer.register_parameter(name, parameter)
        channel_scales = ChannelQuantScaleParameter(**tensor("channel_scales", (rows,), torch.float32, None))
        layer.register_parameter("channel_scales", channel_scales)

    def _packed(self, layer: torch.nn.Module) -> Packed:
        plain = W4A8Weight(*(getattr(layer, name).data for name in W4A8Weight._fields))
        if self.made_up:
            _make_up(plain)
        packed = _pack_by_rows(*layer.qweight.shape, lambda rows: W4A8Weight(*(part[rows] for part in plain)))
        for name in W4A8Weight._fields:
            delattr(layer, name)
        return packed


@register_weight_loader_v2_supported_method
class W4A8OnlineLinearMethod(_W4A8Linear):
    """A linear of an unquantised checkpoint, rounded to W4A8 as soon as its weight is complete.

    vLLM holds such a weight on no device until then, so that one layer at a time is there in full. Each rank rounds
    what it has, so results depend on the number of ranks (`W4A8Config`).
    """

    uses_meta_device = True
    rounds_while_loading = True

    def _register(
        self,
        layer: torch.nn.Module,
        rows: int,
        columns: int,
        width: int,
        dtype: torch.dtype,
        weight_loader: MethodType,
    ) -> None:
        weight = ModelWeightParameter(
            data=torch.empty(rows, columns, dtype=dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=self.arrivals.loader("weight", weight_loader, None, width),
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def _packed(self, layer: torch.nn.Module) -> Packed:
        weight = layer.weight.data
        packed = _pack_by_rows(*weight.shape, lambda rows: quantize(weight[rows], self.group_size))
        del layer.weight
        return packed


def _pack_by_rows(count: int, columns: int, rows_of: Callable[[slice], W4A8Weight]) -> Packed:
    """Pack a weight of `count` rows, some at a time: rows do not depend on each other."""
    step = max(_ELEMENTS_AT_ONCE // columns // _TILE_ROWS, 1) * _TILE_ROWS
    parts = []
    for start in range(0, count, step):
        try:
            weight = rows_of(slice(start, start + step))
            parts.append((*pack(weight), weight.channel_scales))
        except ValueError as error:
            raise ValueError(f"in rows {start} to {min(start + step, count) - 1}: {error}") from None
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _make_ready(packed: Packed, columns: int, dtype: torch.dtype) -> None:
    """What a packed weight `columns` wide needs on a GPU before its first product, with a result of `dtype`."""
    tiles, group_params, channel_scales = packed
    device = tiles.device
    if device.type != "cuda":
        return
    # Kernels may fetch weights while the kernel in front of them on the stream still runs: it must not be the one that
    # writes them.
    torch.cuda.current_stream(device).synchronize()
    from kvcompile.ops.w4a8.cuda import prepare  # not at the top: for a GPU only

    prepare(device, channel_scales.shape[0], columns, group_params.shape[1], dtype)


def _make_up(weight: W4A8Weight) -> None:
    """Fill a weight for `--load-format dummy`: random, the same each time, in range, of about the size of real ones."""
    generator = torch.Generator(weight.qweight.device).manual_seed(0)
    weight.qweight.random_(0, 256, generator=generator)
    weight.group_scales.fill_(16)
    weight.group_zeros.fill_(8)
    weight.channel_scales.fill_(weight.in_features**-0.5 / 128)
