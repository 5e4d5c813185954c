"""The start-up line: what of kvcompile is active in this server, and why anything is not."""

from __future__ import annotations

import os
from collections.abc import Mapping

from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompile import __version__
from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm import lm_head_choice, prune_reach
from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE, SCHEDULER, W4A8_QUANTIZATION, offloads, prunes
from kvcompile.presets import MODULES, NAME, PASS_NAMES

_SWAP, _ROTARY = "attention_swap", "rotary"


def startup_line(config: VllmConfig, notes: Mapping[str, str]) -> str:
    """One line, from the configuration that vLLM ended up with. `notes`: module -> why the preset left it alone."""
    off = why_not(config, notes)
    active = [f"{name} ({state(config)[0]})" for name, state in _STATE.items() if name not in off]
    inactive = [f"{name} ({why})" for name, why in off.items()]
    inactive += [f"{module.name} (not in this version)" for module in MODULES if not module.available]
    return (
        f"kvcompile {__version__}: active: {', '.join(active) or 'nothing'}; "
        f"not active: {', '.join(inactive) or 'nothing'}"
    )


def why_not(config: VllmConfig, notes: Mapping[str, str]) -> dict[str, str]:
    """Part -> reason, for the parts that this version has and that are not active."""
    reasons = {name: notes.get(name) or state(config)[1] for name, state in _STATE.items()}
    return {name: why for name, why in reasons.items() if why}


def in_the_way(config: VllmConfig, notes: Mapping[str, str]) -> dict[str, str]:
    """`why_not` less what is no obstacle: what `strict` refuses where the user has not switched the part off.

    Being on means for linear "W4A8 where the weights are W4A8": a checkpoint that is not quantised, or is in another
    way, leaves it nothing to do. Nothing was asked for that cannot be had, so strict has nothing to refuse. Nor has it
    where every pass is switched off, or all but the attention swap, whose work is done without it too, and rotary where
    it has nothing to do, or where pruning or offload is off.
    """
    off = why_not(config, notes)
    if config.model_config.quantization != W4A8_QUANTIZATION:
        off.pop("linear", None)
    if set(_switched_on(config)) <= {_SWAP, *([_ROTARY] if _no_rotary(config) else [])}:
        off.pop("passes", None)
    if not config.additional_config[NAME]["prune"]["enabled"]:
        off.pop("prune", None)
    if not config.additional_config[NAME]["offload"]["enabled"]:
        off.pop("offload", None)
    return off


def unreachable(config: VllmConfig) -> str | None:
    """Why no graph reaches a pass, whichever are switched on; None if graphs do."""
    mode, backend = config.compilation_config.mode, config.compilation_config.backend
    if mode == CompilationMode.NONE:
        why = "--enforce-eager" if config.model_config.enforce_eager else "compilation mode NONE"
        return f"{why}: nothing is compiled"
    if mode != CompilationMode.VLLM_COMPILE:
        return f"compilation mode {mode.name} runs no passes"
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE is set: nothing is compiled"
    if backend != "inductor":
        return f"compilation backend {backend} runs no passes"
    return None


def _kv8(config: VllmConfig) -> tuple[str, str | None]:
    size, itemsize = config.model_config.get_head_size(), config.model_config.dtype.itemsize
    ours = config.attention_config.backend is AttentionBackendEnum.CUSTOM
    kernels = (
        "torch CPU operators" if current_platform.is_cpu() else "CUDA kernels" if ours else "vLLM's Triton kernels"
    )
    return f"{2 * (size + 4)} instead of {2 * size * itemsize} bytes per token and KV head, {kernels}", None


def _passes(config: VllmConfig) -> tuple[str, str | None]:
    if why := unreachable(config):
        return "", why
    on = _switched_on(config)
    if not on:
        return "", "every pass is switched off"
    idle = {name: why for name, reason in _NO_SITES.items() if name in on and (why := reason(config))}
    idle_said = [f"no {name}: {why}" for name, why in idle.items()]
    on = [name for name in on if name not in idle]
    if not on:
        return "", ", ".join(idle_said)
    fusions = set(on) - _NO_SITES.keys() and config.model_config.quantization != W4A8_QUANTIZATION
    said = [
        f"{' and '.join(on)} in VLLM_COMPILE",
        *(["without W4A8 linears no quantiser to fuse with"] if fusions else []),
        *idle_said,
    ]
    return ", ".join(said), None


def _no_rotary(config: VllmConfig) -> str | None:
    """Why the pass that joins rotary embedding has nothing to join, as far as that is known before a graph is there."""
    custom = config.compilation_config.custom_ops
    if "+rotary_embedding" in custom or ("all" in custom and "-rotary_embedding" not in custom):
        return "vLLM's own kernel is switched on (+rotary_embedding)"
    if config.model_config.uses_mrope:
        return "positions have several dimensions"
    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", 1.0)
    return f"{share:.0%} of each head is turned" if share < 1 else None


def _no_swap(config: VllmConfig) -> str | None:
    """Why the pass that swaps the attention operator has nothing to swap; None if it has."""
    compilation = config.compilation_config
    ours = config.cache_config.cache_dtype == KV8_CACHE_DTYPE
    if not ours or config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
        return "attention is not kvcompile's"
    if compilation.splitting_ops and not compilation.use_inductor_graph_partition:
        return "graphs are split at attention, where its backend does the same"
    return None


# Passes whose sites do not depend on the linears, and why there may be none.
_NO_SITES = {_ROTARY: _no_rotary, _SWAP: _no_swap}


def _switched_on(config: VllmConfig) -> list[str]:
    """Names of the passes that the configuration leaves on, in order."""
    return [name for name in PASS_NAMES if config.additional_config[NAME]["passes"][name]]


def _linear(config: VllmConfig) -> tuple[str, str | None]:
    model = config.model_config
    if model.quantization is None:
        return "", "the checkpoint is not quantised"
    if model.quantization != W4A8_QUANTIZATION:
        return "", f"the checkpoint is {model.quantization}"
    kernels = "torch CPU operators" if current_platform.is_cpu() else "CUDA kernels"
    sizes, head = config.quant_config.group_sizes, lm_head_choice.said(config)
    if sizes is None:
        return f"W4A8, quantised while loading, {kernels}{head}", None
    groups = sorted({"channel" if width == group else str(group) for width, group in sizes.items()})
    return f"W4A8 checkpoint, group size {' and '.join(groups)}, {kernels}{head}", None


def _scheduler(config: VllmConfig) -> tuple[str, str | None]:
    if config.scheduler_config.scheduler_cls != SCHEDULER:
        return "", "vLLM's own"
    options = config.additional_config[NAME]["scheduler"]
    kind = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
    said = (
        f"by KV length, {kind}, blocks for {options['horizon_steps']} steps ahead, "
        f"passed over by at most {options['max_wait_batches']} batches"
    )
    return said, None


def _prune(config: VllmConfig) -> tuple[str, str | None]:
    options = config.additional_config[NAME]["prune"]
    if not options["enabled"]:
        return "", "prune.enabled=false"
    if not prunes(config):
        return "", f"worker {config.parallel_config.worker_cls}"
    budget = options["budget_tokens"]
    kept = f"{budget} tokens" if budget else f"{options['keep_ratio']:.0%}, at least {options['min_tokens']} tokens"
    reach = prune_reach.said(config, PruneConfig(**options))
    return ", ".join([f"{options['method']}, of a prompt {kept} kept", *reach]), None


def _offload(config: VllmConfig) -> tuple[str, str | None]:
    if not offloads(config):
        return "", "offload.enabled=false"
    options = config.additional_config[NAME]["offload"]
    said = (
        f"{options['cpu_bytes_to_use']} bytes of host memory, copies ahead of need below "
        f"{options['lazy_gpu_free_trigger']:.0%} free blocks"
    )
    return said, None


_STATE = {
    "kv8": _kv8,
    "passes": _passes,
    "linear": _linear,
    "prune": _prune,
    "scheduler": _scheduler,
    "offload": _offload,
}
