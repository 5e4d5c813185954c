"""The configuration: what can be set, its defaults and ranges, and how the sources become one checked value.

Sources, later wins: the defaults below (as a preset changes them), the TOML or JSON file named by KVCOMPILE_CONFIG,
KVCOMPILE_<SECTION>_<FIELD> in the environment, and vLLM's --additional-config '{"kvcompile": {...}}'. Whatever is
unknown, of the wrong type or out of range is a UsageError; nothing is silently coerced or ignored.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

from kvcompile.config_options import UsageError, option, options_of, shown, validate
from kvcompile.config_sources import FLAG_SOURCE, PRESET_SOURCE, merge

__all__ = [
    "OPTIONS",
    "SECTIONS",
    "KVCompileConfig",
    "Kv8Config",
    "LinearConfig",
    "OffloadConfig",
    "OptionRow",
    "PassesConfig",
    "PruneConfig",
    "Resolved",
    "SchedulerConfig",
    "UsageError",
    "describe",
    "resolve",
    "to_dict",
]

BLOCK_TOKENS = (16, 32, 64, 128)  # that vLLM makes a KV block of, the fewest first
LM_HEAD_INT8_ROWS = 64  # requests at once up to which an int8 head is faster on a GPU; `lm_head_choice` says by what
MAX_TOKENS = 2**31 - 1  # vLLM keeps token counts in 32-bit integers


class _Section:
    """Base of the dataclasses: every option is checked when an instance is made."""

    SECTION: ClassVar[str]

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Kv8Config(_Section):
    """The int8 KV cache."""

    SECTION: ClassVar[str] = "kv8"
    enabled: bool = option(True, doc="Store keys and values as int8 with one scale per token and head.")


@dataclass(frozen=True)
class LinearConfig(_Section):
    """Quantised linear layers."""

    SECTION: ClassVar[str] = "linear"
    enabled: bool = option(True, doc="Run W4A8 linears (4-bit weights, 8-bit activations) for W4A8 checkpoints.")
    lm_head_int8: str = option(
        "auto",
        choices=("auto", "always", "never"),
        doc="Serve the head of a W4A8 model in int8, unless it is tied or the checkpoint says to leave it: auto does "
        "on a CPU, and on a GPU where it is faster, with --max-num-seqs of at most 64.",
    )


@dataclass(frozen=True)
class PassesConfig(_Section):
    """The FX passes over the compiled graph."""

    SECTION: ClassVar[str] = "passes"
    norm_quant: bool = option(True, doc="Fuse RMSNorm with the activation quantisation that follows it.")
    swiglu_quant: bool = option(True, doc="Fuse SwiGLU with the activation quantisation that follows it.")
    rotary: bool = option(True, doc="Compute the rotary embedding of query and key in one kernel.")
    attention_swap: bool = option(True, doc="Replace the attention operator by the int8-KV one.")


@dataclass(frozen=True)
class PruneConfig(_Section):
    """Pruning of the KV cache: a prompt of T tokens keeps about max(keep_ratio * T, min_tokens), or budget_tokens."""

    SECTION: ClassVar[str] = "prune"
    enabled: bool = option(True, doc="Prune the KV cache of a request when its prompt has been computed.")
    method: str = option(
        "robust",
        choices=("robust", "andpro", "snapkv", "tova", "keydiff", "critical", "blend", "streaming", "random"),
        doc="How tokens are scored; streaming and random are baselines.",
    )
    keep_ratio: float = option(0.5, above=0, high=1, doc="Share of a prompt's tokens that is kept.")
    min_tokens: int = option(
        544, low=17, high=MAX_TOKENS, doc="Fewest tokens that the ratio keeps; shorter prompts stay whole."
    )
    budget_tokens: int | None = option(
        None, low=17, high=MAX_TOKENS, doc="Tokens kept whatever the prompt's length; overrides the ratio."
    )
    window_tokens: int = option(
        32, low=1, high=4096, doc="Last tokens of the prompt that score the others and are always kept."
    )
    sink_tokens: int = option(4, low=0, high=4096, doc="First tokens of the prompt that are always kept.")
    inline: str = option(
        "auto",
        choices=("auto", "always", "never"),
        doc="Store kept tokens alone, of a prompt that one step computes whole: auto does where blocks are short or "
        "prefixes are not cached; always uses no prefix hits and waits for such a step; never stores whole prompts.",
    )

    def least_budget(self, block_tokens: int) -> int:
        """Fewest tokens that may be kept with blocks of so many."""
        return self.sink_tokens + self.window_tokens + block_tokens

    def refuse_small_budget(self, block_tokens: int | None) -> None:
        """Raise UsageError if what decides how much is kept is below `least_budget`.

        block_tokens: None where it is not known; then only what every size of a block makes too small is refused.
        """
        name = "min_tokens" if self.budget_tokens is None else "budget_tokens"
        value, least = getattr(self, name), self.least_budget(block_tokens or BLOCK_TOKENS[0])
        if value >= least:
            return
        block, needed, smaller = str(block_tokens), f" = {least}", ""
        if block_tokens is None:
            each = (f"{self.least_budget(tokens)} with {tokens}" for tokens in BLOCK_TOKENS)
            block, needed, least = "a block", f": {', '.join(each)} tokens a block", "that"
        elif block_tokens > BLOCK_TOKENS[0]:
            smaller = " or --block-size"
        raise UsageError(
            f"prune.{name} is {value}, less than prune.sink_tokens + prune.window_tokens + {block}{needed}: give "
            f"prune.{name} at least {least}, or lower prune.window_tokens or prune.sink_tokens{smaller}"
        )


@dataclass(frozen=True)
class SchedulerConfig(_Section):
    """The scheduler that batches requests by the length of the KV they hold."""

    SECTION: ClassVar[str] = "scheduler"
    enabled: bool = option(True, doc="Use the KV-length-aware scheduler instead of first come, first served.")
    max_wait_batches: int = option(
        2, low=1, high=1_000_000, doc="Most batches that may pass a request over for younger ones before it must run."
    )
    horizon_steps: int = option(
        32,
        low=1,
        high=65536,
        doc="Decode steps ahead for which blocks are kept: who is admitted is not preempted in them.",
    )
    reserve_ratio: float = option(0.01, low=0, high=1, doc="Share of the KV blocks that no admission may take.")


@dataclass(frozen=True)
class OffloadConfig(_Section):
    """The host pool that turns a preemption into a copy."""

    SECTION: ClassVar[str] = "offload"
    enabled: bool = option(False, doc="Copy cold KV blocks to host memory so that a preempted request can be restored.")
    cpu_bytes_to_use: int = option(
        4 << 30, low=1 << 20, high=1 << 50, size=True, doc="Host memory of the pool, per worker; never exceeded."
    )
    lazy_gpu_free_trigger: float = option(
        0.35, low=0, high=1, doc="Share of free GPU blocks below which preventive copies begin."
    )
    max_scan_reqs: int = option(3, low=1, high=65536, doc="Most likely victims examined for copies in one step.")


@dataclass(frozen=True)
class KVCompileConfig(_Section):
    """The whole configuration."""

    SECTION: ClassVar[str] = ""
    kv8: Kv8Config = Kv8Config()
    linear: LinearConfig = LinearConfig()
    passes: PassesConfig = PassesConfig()
    prune: PruneConfig = PruneConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    offload: OffloadConfig = OffloadConfig()
    strict: bool = option(
        False,
        doc="Make it an error, not a warning, when something that is on cannot take effect; pruning only where it, or "
        "one of its options, was set.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, cls in SECTIONS.items():
            if not isinstance(getattr(self, name), cls):
                raise UsageError(f"{name} is {shown(getattr(self, name))}: give a {cls.__name__}")


SECTIONS = {field.name: field.type for field in fields(KVCompileConfig) if is_dataclass(field.type)}
OPTIONS = {rules.key: rules for cls in (*SECTIONS.values(), KVCompileConfig) for rules in options_of(cls)}


class OptionRow(NamedTuple):
    """One line of the reference: `allowed` is in words."""

    key: str
    default: Any
    allowed: str
    doc: str


@dataclass(frozen=True)
class Resolved:
    """A configuration, and for each dotted key that the user set, the human name of the last source that did."""

    config: KVCompileConfig
    sources: dict[str, str]

    def asks_for(self, section: str) -> bool:
        """Whether a part is on by the user's wish, who switched it on or set one of its options, not by default."""
        set_by_user = any(key.startswith(f"{section}.") for key in self.sources)
        return set_by_user and getattr(self.config, section).enabled

    def refuse_small_budget(self, block_tokens: int | None) -> None:
        """`PruneConfig.refuse_small_budget`, naming where the values come from."""
        try:
            self.config.prune.refuse_small_budget(block_tokens)
        except UsageError as error:
            raise _naming(error, self.sources) from None


def resolve(
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
    overrides_source: str = FLAG_SOURCE,
    judge_budget: bool = True,
) -> Resolved:
    """Read all sources and merge them, later wins: defaults, `base`, file, `environ`, `overrides`.

    `base` is what a preset changes and `overrides` what the user gave under "kvcompile" in --additional-config, or
    where `overrides_source` says; both take nested or dotted keys. `environ` is the process environment when None.
    Raises UsageError, which names the source, for anything that is unknown, given twice, of the wrong type or out of
    range, and for an unreadable file.

    judge_budget: False if the caller will know the size of a block, and calls `refuse_small_budget` then.
    """
    settings = merge(
        OPTIONS,
        base=base,
        environ=os.environ if environ is None else environ,
        overrides=overrides,
        overrides_source=overrides_source,
    )
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *SECTIONS)}
    for key, setting in settings.items():
        section, _, name = key.rpartition(".")
        values[section][name] = setting.value
    sections = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
    config = KVCompileConfig(**sections, **values[""])
    if judge_budget:  # each value is valid alone; what is left are values that disagree, perhaps across sources
        Resolved(config, {key: setting.source for key, setting in settings.items()}).refuse_small_budget(None)
    named_by_user = {key: s.source for key, s in settings.items() if s.source != PRESET_SOURCE}
    return Resolved(config, named_by_user)


def _naming(error: UsageError, sources: Mapping[str, str]) -> UsageError:
    """The error with where the values that it names come from, if any does."""
    named = [f"{key} is from {source}" for key, source in sources.items() if key in str(error)]
    return UsageError(f"{error} ({'; '.join(named)})") if named else error


def to_dict(config: KVCompileConfig) -> dict[str, Any]:
    """The configuration as nested plain values that JSON can hold; `resolve(overrides=...)` reads it back."""
    return asdict(config)


def describe() -> list[OptionRow]:
    """Every option with its default, the allowed values in words, and a one-line description."""
    return [OptionRow(rules.key, rules.default, rules.allowed, rules.doc) for rules in OPTIONS.values()]
