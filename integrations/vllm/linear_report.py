"""What vLLM's log says of W4A8 linears: how they were quantised while loading, and what is off without the preset."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kvcompile import __version__
from kvcompile.config import KVCompileConfig
from kvcompile.integrations.vllm import lm_head_choice
from kvcompile.integrations.vllm.active import W4A8_QUANTIZATION
from kvcompile.presets import MODULES, NAME

logger = init_logger("vllm.kvcompile")


def say_what_is_off(config: VllmConfig) -> None:
    """One line where W4A8 linears are served and kvcompile itself was not asked for; nothing in any other case."""
    if config.model_config is None or config.model_config.quantization != W4A8_QUANTIZATION:
        return
    how = "quantised while loading" if config.quant_config.group_sizes is None else "W4A8 checkpoint"
    # Of what the flag alone would switch on.
    parts = [module.name for module in MODULES if module.available and module.name != "linear"]
    off = ", ".join(name for name in parts if getattr(getattr(KVCompileConfig(), name), "enabled", True))
    logger.info(
        "kvcompile %s: active: linear (%s%s); not active without --compilation-config %s: %s",
        *(__version__, how, lm_head_choice.said(config), NAME, off),
    )


def say_what_was_quantised(model: torch.nn.Module) -> None:
    """One line on the linears, of one rank, that were rounded to W4A8 while they were loaded; none where none were."""
    sizes: dict[int, int] = {}  # group -> linears
    bits = weights = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not getattr(method, "rounds_while_loading", False):
            continue
        sizes[method.group_size] = sizes.get(method.group_size, 0) + 1
        bits += sum(8 * getattr(layer, name).nbytes for name in ("tiles", "group_params", "channel_scales"))
        weights += layer.channel_scales.shape[0] * method.columns
    if sizes:
        groups = " and ".join(f"{count} in groups of {size}" for size, count in sorted(sizes.items(), reverse=True))
        logger.info(
            "W4A8: %d linears were quantised while loading, by rounding to nearest (rtn; `kvcompile quantize` searches "
            "or calibrates instead): %s, %.3f bits per weight",
            *(sum(sizes.values()), groups, bits / weights),
        )
