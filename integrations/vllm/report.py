"""The start-up line: what of kvcompile is active in this server, and why anything is not."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from kvcompile import __version__
from kvcompile.presets import MODULES


def startup_line(config: VllmConfig, notes: Mapping[str, str]) -> str:
    """One line, from the configuration that vLLM ended up with. `notes`: module -> why the preset left it alone."""
    active, inactive = [], []
    for module in MODULES:
        if not module.available:
            inactive.append(f"{module.name} (not in this version)")
        elif module.name in notes:
            inactive.append(f"{module.name} ({notes[module.name]})")
        else:
            what, why_not = _STATE[module.name](config)
            (inactive if why_not else active).append(f"{module.name} ({why_not or what})")
    return (
        f"kvcompile {__version__}: active: {', '.join(active) or 'nothing'}; "
        f"not active: {', '.join(inactive) or 'nothing'}"
    )


def _kv8(config: VllmConfig) -> tuple[str, str | None]:
    size, itemsize = config.model_config.get_head_size(), config.model_config.dtype.itemsize
    kernels = "torch CPU operators" if current_platform.is_cpu() else "vLLM's Triton int8 kernels"
    return f"{2 * (size + 4)} instead of {2 * size * itemsize} bytes per token and KV head, {kernels}", None


def _passes(config: VllmConfig) -> tuple[str, str | None]:
    mode, backend = config.compilation_config.mode, config.compilation_config.backend
    if mode == CompilationMode.NONE:
        why = "--enforce-eager" if config.model_config.enforce_eager else "compilation mode NONE"
        return "", f"{why}: nothing is compiled"
    if mode != CompilationMode.VLLM_COMPILE:
        return "", f"compilation mode {mode.name} runs no passes"
    if backend != "inductor":
        return "", f"compilation backend {backend} runs no passes"
    return "pipeline in VLLM_COMPILE, no pass in this version", None


_STATE = {"kv8": _kv8, "passes": _passes}
