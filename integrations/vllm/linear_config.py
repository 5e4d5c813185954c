"""The vLLM quantisation `kvcompile_w4a8`: what a W4A8 checkpoint says of itself, checked, and which layers it means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from kvcompile.config import UsageError, shown
from kvcompile.integrations.vllm.active import W4A8_QUANTIZATION
from kvcompile.ops.w4a8 import check_group, is_legal_group, legal_group
from kvcompile.ops.w4a8.reference import GROUP_STEP

FORMAT = 1
ONLINE_GROUP = 128  # channels a group where the weights are quantised while they load; smaller where it does not divide
CHANNEL = "channel"  # one group as wide as the layer

NO_LORA = "--enable-lora does not work with W4A8 weights; remove it, or serve an unquantised checkpoint"

logger = init_logger("vllm.kvcompile")

_KEYS = ("quant_method", "format", "group_size", "group_sizes", "method", "modules_to_not_convert")
_ACTIVATION_WORDS = ("activation", "input", "act_")
_ANEW = "quantise it anew with `kvcompile quantize`"
_LINEAR = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")
# Never W4A8; a list may say so. With lm_head in it the head stays as it is, else it is served in int8.
_NOT_IN_LAYERS = ("lm_head", "model.embed_tokens")
_WIDTH = re.compile(r"[1-9][0-9]{0,8}")


class W4A8Config(QuantizationConfig):
    """4-bit weights in two levels, int8 activations with one symmetric scale per token.

    `group_sizes`: input width of a layer -> channels a group, as the checkpoint has them; None where the checkpoint is
    not quantised and its weights are while they load. `skipped`: full names of linears that are left as they are.

    Weights that are quantised while they load depend on the number of tensor-parallel ranks: of a linear that is cut
    along its input (o_proj, down_proj) each rank rounds its own share, with row scales of its own and groups that fit
    the share. A W4A8 checkpoint is the same on any number of ranks.
    """

    def __init__(self, group_sizes: Mapping[int, int] | None = None, skipped: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.group_sizes = None if group_sizes is None else dict(group_sizes)
        self.skipped = list(skipped)

    def identity(self) -> str:
        """A text that is the same for equal configurations and for no others."""
        sizes = None if self.group_sizes is None else sorted(self.group_sizes.items())
        return json.dumps([sizes, sorted(self.skipped)])

    @classmethod
    def get_name(cls) -> str:
        return W4A8_QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16] + ([torch.float32] if current_platform.is_cpu() else [])

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all; vLLM then calls W4A8Config() for a checkpoint without a quantization_config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> W4A8Config:
        """Read a checkpoint's `quantization_config`. Raises UsageError for what this version does not serve."""
        _refuse_unknown_keys(config)
        if type(config.get("format")) is not int or config["format"] != FORMAT:  # True == 1
            raise UsageError(
                f"quantization_config: format is {_shown(config.get('format'))}; this version of kvcompile reads "
                f"{FORMAT}; {_ANEW}, or install the kvcompile that wrote it"
            )
        sizes = config.get("group_sizes")
        if not isinstance(sizes, Mapping) or not sizes:
            raise UsageError(
                f"quantization_config: group_sizes is {_shown(sizes)}; allowed is a table from input width to group "
                f'size, such as {{"4096": 128}}; {_ANEW}'
            )
        if (group := config.get("group_size")) is not None and group != CHANNEL and type(group) is not int:
            raise UsageError(
                f'quantization_config: group_size is {_shown(group)}; allowed is a whole number or "{CHANNEL}"; {_ANEW}'
            )
        if type(group) is int and (group < 1 or group % GROUP_STEP):
            raise UsageError(
                f"quantization_config: group_size is {_shown(group)}; allowed is a positive multiple of {GROUP_STEP} "
                f'or "{CHANNEL}"; {_ANEW}'
            )
        if (method := config.get("method")) is not None and not isinstance(method, str):
            raise UsageError(
                f"quantization_config: method is {_shown(method)}; allowed is the name of a method; {_ANEW}"
            )
        skipped = config.get("modules_to_not_convert")
        skipped = [] if skipped is None else skipped
        if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
            raise UsageError(
                f"quantization_config: modules_to_not_convert is {_shown(skipped)}; allowed is a list of names; {_ANEW}"
            )
        return cls(dict(_group_size(width, group) for width, group in sizes.items()), tuple(skipped))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """None for what is no linear (attention, embeddings, a head that stays): vLLM then keeps its own method.

        Raises UsageError for the experts of a mixture, and for LoRA.
        """
        # Not at the top: a process that only builds a configuration has no use for vLLM's layers.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from kvcompile.integrations.vllm import linear_complete, lm_head_choice
        from kvcompile.integrations.vllm.linear import W4A8LinearMethod, W4A8OnlineLinearMethod
        from kvcompile.integrations.vllm.lm_head import Int8HeadMethod

        linear_complete.install()  # vLLM asks this of every layer before it loads the first weight
        if isinstance(layer, RoutedExperts):
            raise UsageError(
                f"layer {prefix}: W4A8 does not reach the experts of a mixture; serve the checkpoint without "
                f"{W4A8_QUANTIZATION}"
            )
        if isinstance(layer, ParallelLMHead):
            why = lm_head_choice.why_not(get_current_vllm_config(), self, layer.embedding_dim)
            return Int8HeadMethod(prefix) if why is None else None
        if not isinstance(layer, LinearBase):
            return None
        if get_current_vllm_config().lora_config is not None:  # the preset has refused it before; not everyone uses it
            raise UsageError(NO_LORA)
        if self.skips(prefix):
            return UnquantizedLinearMethod()
        return (W4A8OnlineLinearMethod if self.group_sizes is None else W4A8LinearMethod)(self, prefix)

    def refuse_unknown_skipped(self, layers: int) -> None:
        """Raise UsageError for a name in modules_to_not_convert that a Llama of so many layers does not have."""
        for name in self.skipped:
            of_layer = _LINEAR.fullmatch(name[:80])
            if name not in _NOT_IN_LAYERS and not (of_layer and int(of_layer[1]) < layers):
                raise UsageError(
                    f"quantization_config: modules_to_not_convert has {shown(name)}, which names no linear of this "
                    f"model of {layers} layers; allowed are full names, such as model.layers.0.mlp.down_proj; {_ANEW}"
                )

    def skips(self, prefix: str) -> bool:
        """Whether the checkpoint leaves the linear of that full name as it was.

        Raises UsageError, naming the layer, if it leaves some of what vLLM merges into that linear, but not all.
        """
        before, dot, name = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(name, [name])
        skipped = [part for part in parts if f"{before}{dot}{part}" in self.skipped]
        if skipped and len(skipped) < len(parts):
            raise UsageError(
                f"layer {prefix}: modules_to_not_convert has {', '.join(skipped)} of it alone; vLLM merges "
                f"{', '.join(parts)}, so allowed are all of them or none; {_ANEW}"
            )
        return bool(skipped)

    def group_on_rank(self, layer: str, width: int, ranks: int) -> int:
        """Channels a group in the `width` / `ranks` input channels that one rank has of a layer `width` wide.

        Raises UsageError, naming the layer and both numbers, if a group straddles two ranks.
        """
        own = width // ranks
        if self.group_sizes is None:
            if ranks > 1:
                logger.info_once(
                    "W4A8, quantised while loading: each of %d ranks rounds its own share of o_proj and down_proj; "
                    "results depend on --tensor-parallel-size",
                    ranks,
                )
            try:
                return legal_group(own, ONLINE_GROUP)  # each rank quantises its own shard: nothing can straddle
            except ValueError as error:
                raise UsageError(f"layer {layer}: {error}; serve the checkpoint without {W4A8_QUANTIZATION}") from None
        group = self.group_sizes.get(width)
        if group is None:
            widths = ", ".join(map(str, self.group_sizes))
            raise UsageError(
                f"layer {layer}: quantization_config has no group size for an input width of {width}, only for "
                f"{widths if len(widths) <= 80 else widths[:77] + '...'}; {_ANEW}"
            )
        if group == width and is_legal_group(own, own):
            return own  # one zero and scale per row, and every rank has them
        if own % group:
            raise UsageError(
                f"layer {layer}: groups of {group} do not divide the {own} input channels of one rank ({width} over "
                f"{ranks} ranks); choose a --tensor-parallel-size that divides {width // group}, or quantise with a "
                f"group size that divides {own}"
            )
        return group


def _refuse_unknown_keys(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in _KEYS:
            continue
        if any(word in key for word in _ACTIVATION_WORDS):
            raise UsageError(
                f"quantization_config: {_key(key)} is {_shown(value)}; activations are int8, symmetric, with one scale "
                f"per token found at run time, and nothing else is served; {_ANEW}"
            )
        raise UsageError(
            f"quantization_config: {_key(key)} is not known; format {FORMAT} has {', '.join(_KEYS)}; {_ANEW}, or "
            "install the kvcompile that wrote it"
        )


def _group_size(width: Any, group: Any) -> tuple[int, int]:
    try:
        if group != CHANNEL and type(group) is not int:  # int() would cut 64.9 down to 64
            raise TypeError(f'allowed is a whole number or "{CHANNEL}"')
        if not isinstance(width, str) or not _WIDTH.fullmatch(width):  # int() takes " 256" and "2_56" as well
            raise TypeError("allowed as a width is a positive whole number in plain digits")
        wide = int(width)
        size = wide if group == CHANNEL else group
        check_group(wide, size)
    except (TypeError, ValueError) as error:
        pair = f"{_shown(width)}: {_shown(group)}"
        raise UsageError(f"quantization_config: group_sizes has {pair}: {_cut(str(error))}; {_ANEW}") from None
    return wide, size


def _shown(value: Any) -> str:
    """As Python writes it, on one line of at most 80 characters."""
    return repr(value) if value is None or isinstance(value, bool) else shown(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"\w{1,40}", key, re.ASCII) else shown(key)


def _cut(text: str) -> str:
    return text if len(text) <= 250 else f"{text[:247]}..."
