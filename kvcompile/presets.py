"""What `--compilation-config kvcompile` turns on in this version, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcompile.config import Resolved, UsageError

NAME = "kvcompile"


@dataclass(frozen=True)
class Module:
    """One switchable part of kvcompile. `available` is False for a part whose code this version does not have."""

    name: str
    available: bool
    what: str


MODULES = (
    Module("kv8", True, "int8 KV cache with one scale per token and KV head"),
    Module("passes", True, "FX pass pipeline inside vLLM's compile path"),
    Module("linear", True, "W4A8 linears"),
    Module("prune", True, "value-aware KV pruning"),
    Module("scheduler", True, "KV-length-aware scheduler"),
    Module("offload", True, "host offload of preempted requests"),
)

# The FX passes that this version has, in order: the names in `kvcompile.passes.pipeline.PASSES`, which needs torch.
PASS_NAMES: tuple[str, ...] = ("norm_quant", "swiglu_quant", "rotary", "attention_swap")


def availability() -> list[tuple[str, str, str]]:
    """Rows (module, "available" | "not yet", what it is) for `kvcompile doctor` and the demo's table."""
    return [(m.name, "available" if m.available else "not yet", m.what) for m in MODULES]


def in_this_version(key: str) -> bool:
    """Whether the option `key` belongs to a part that this version has."""
    section, _, field = key.partition(".")
    if section == "passes":
        return field in PASS_NAMES
    return all(m.available for m in MODULES if m.name == section)


def refuse_unavailable(resolved: Resolved) -> None:
    """Raise `UsageError` if the user set a key of a part that this version cannot run; switching it off is fine."""
    missing = {m.name: m.what for m in MODULES if not m.available}
    for key, source in resolved.sources.items():
        section, _, field = key.partition(".")
        value = getattr(getattr(resolved.config, section), field) if field else None
        if section in missing and (field, value) != ("enabled", False):
            raise UsageError(
                f"{key} (from {source}): {missing[section]} is not in this version of kvcompile; remove the key "
                f"or set {section}.enabled=false"
            )
        if section == "passes" and value is True and field not in PASS_NAMES:
            raise UsageError(
                f"{key} (from {source}): this version of kvcompile has no such pass (it has: "
                f"{', '.join(PASS_NAMES) or 'none'}); remove the key or set it to false"
            )


def compilation_config(**fields: Any) -> Any:
    """vLLM's CompilationConfig with kvcompile requested: `LLM(model, compilation_config=compilation_config(mode=0))`.

    `fields` are vLLM's own CompilationConfig fields and win over the preset. Needs vLLM installed.
    """
    from kvcompile.integrations.vllm.request import Request

    return Request(fields).compilation_config()
