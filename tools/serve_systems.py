"""The systems that `kvcompile bench serve` compares: what vLLM is given for each, and what it has to say of itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcompile.config import PruneConfig, UsageError
from kvcompile.presets import NAME

BLOCK_SIZE = 16
_PARTS = ("kv8", "linear", "prune", "scheduler", "offload")
_W4A8 = {"quantization": "kvcompile_w4a8"}
_INT8 = "int8_per_token_head"
AGGRESSIVE = 544  # prune.budget_tokens of the setting that AnDPro's published figures are of

# Facts that an engine gives of itself (`serve_engine`), as all systems have them unless one says otherwise.
_STOCK = {
    "block_size": BLOCK_SIZE,
    "model_dtype": "bfloat16",
    "linears": "bfloat16",
    "dtype": "auto",
    "graphs": "FULL_AND_PIECEWISE",
    "asynchronous": True,
    "prefix_caching": False,
    "kvcompile": False,
    "prunes": False,
    "length_aware": False,
    "connector": None,
}


class System(NamedTuple):
    """Fields of LLM, and what the engine has to say of itself. weights, cache: as `serve_memory` counts their bytes.

    capability: of the GPU, at least. named: served only where --systems names it.
    """

    arguments: dict[str, Any]
    expected: dict[str, Any]
    weights: str = "bf16"
    cache: str = "auto"
    capability: tuple[int, int] = (8, 0)
    named: bool = False


def _stock(expected: Mapping[str, Any], **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return arguments, {**_STOCK, **expected}


def _ours(*parts: str, **prune: Any) -> System:
    """The preset with these parts and no other, whatever a later version switches on by itself."""
    options: dict[str, Any] = {part: {"enabled": part in parts} for part in _PARTS}
    options["prune"] |= prune
    quantised, kv8 = "linear" in parts, "kv8" in parts
    options["passes"] = {"norm_quant": quantised, "swiglu_quant": quantised, "rotary": kv8, "attention_swap": kv8}
    expected = {
        **_STOCK,
        "kvcompile": True,
        "linears": "uint8" if quantised else "bfloat16",  # two codes a byte
        "prunes": "prune" in parts,
        "length_aware": "scheduler" in parts,
        "connector": "KVCompileOffload" if "offload" in parts else None,
    }
    if kv8:
        expected |= {"dtype": _INT8, "attention": "CUSTOM"}
    return System(
        {
            "compilation_config": NAME,
            "additional_config": {NAME: {"strict": True, **options}},
            **(_W4A8 if quantised else {}),
        },
        expected,
        "w4a8" if quantised else "bf16",
        _INT8 if kv8 else "auto",
    )


_WHOLE = ("kv8", "linear", "prune", "scheduler")
SYSTEMS = {
    "vllm-bf16": System(*_stock({})),
    "vllm-fp8": System(
        *_stock({"linears": "float8_e4m3fn", "dtype": "fp8"}, quantization="fp8", kv_cache_dtype="fp8"),
        weights="fp8",
        cache="fp8",
        capability=(8, 9),
    ),
    "vllm-int8": System(
        *_stock({"dtype": _INT8, "attention": "TRITON_ATTN"}, kv_cache_dtype=_INT8, attention_backend="TRITON_ATTN"),
        cache=_INT8,
    ),
    # As --kv-offloading-size sets it up, the host keeps prompts alone (offload_prompt_only) and answers are recomputed.
    "vllm-offload": System(*_stock({"connector": "OffloadingConnector"}, kv_offloading_backend="native")),
    "kvcompile": _ours(*_WHOLE),
    "kvcompile/544": _ours(*_WHOLE, budget_tokens=AGGRESSIVE),
    "kvcompile/kv8": _ours("kv8"),
    "kvcompile/w4a8": _ours("linear"),
    "kvcompile/prune": _ours("kv8", "prune"),
    "kvcompile/scheduler": _ours("scheduler"),
    # Where a version or a machine cannot offload, `strict` ends the engine with the reason.
    "kvcompile/offload": _ours("kv8", "offload")._replace(named=True),
}


def chosen(text: str | None, capability: tuple[int, int]) -> list[str]:
    """The names of --systems; all that a GPU of this capability runs where it is not given. Raises UsageError."""
    if text is None:
        return [name for name, system in SYSTEMS.items() if not system.named and system.capability <= capability]
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise UsageError(f"--systems has {', '.join(map(repr, unknown))}; allowed are {', '.join(SYSTEMS)}")
    for name in names:
        system = SYSTEMS[name]
        if system.capability > capability:
            need, have = (".".join(map(str, each)) for each in (system.capability, capability))
            raise UsageError(f"--systems has {name}: it needs compute capability {need}, the GPU has {have}")
    return list(dict.fromkeys(names))


def arguments_of(name: str, host_gib: int, int8_head: bool = True) -> dict[str, Any]:
    """Fields of LLM for this system alone. host_gib: of host memory, where it offloads to it. int8_head: of W4A8."""
    arguments = copy.deepcopy(SYSTEMS[name].arguments)
    if SYSTEMS[name].weights == "w4a8":
        arguments["additional_config"][NAME]["linear"]["lm_head_int8"] = "always" if int8_head else "never"
    if "kv_offloading_backend" in arguments:
        arguments["kv_offloading_size"] = host_gib
    if name == "kvcompile/offload":
        arguments["additional_config"][NAME]["offload"]["cpu_bytes_to_use"] = host_gib << 30
    return arguments


def pruning_of(name: str) -> PruneConfig | None:
    """How this system prunes; None if it does not."""
    options = SYSTEMS[name].arguments.get("additional_config", {}).get(NAME, {}).get("prune", {})
    return PruneConfig(**options) if options.get("enabled") else None


def check_facts(name: str, facts: Mapping[str, Any]) -> None:
    """Raise UsageError unless the engine runs as its system is meant to."""
    for key, value in SYSTEMS[name].expected.items():
        if facts[key] != value:
            raise UsageError(f"{name}: {key} is {facts[key]} and not {value}: it would not be what is to be compared")
