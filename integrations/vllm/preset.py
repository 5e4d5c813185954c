"""From a request to vLLM's configuration: fill in what the user left at its default, verify, report.

A value that the user gave always wins; what it costs kvcompile is said in the start-up line.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompile.config import Kv8Config, KVCompileConfig, Resolved, SchedulerConfig, UsageError, resolve, to_dict
from kvcompile.config_sources import FLAG_SOURCE
from kvcompile.integrations.vllm import checks, checks_memory, compat, offload_preset, prune_preset, report
from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE, SCHEDULER, offloads
from kvcompile.integrations.vllm.attention_op import split_where_vllm_splits
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass
from kvcompile.integrations.vllm.request import Request
from kvcompile.presets import NAME, refuse_unavailable

logger = init_logger("vllm.kvcompile")

# No field of vLLM's, so an entry of the configuration's __dict__, as is the mark of a request.
_SAID = "_kvcompile_startup_line"

# Backends that read and write that layout: ours, and vLLM's own Triton kernels. The CPU platform would replace the
# latter, with a line in its log, by kernels that take the int8 cache for fp8.
_KV8_BACKENDS = {None, AttentionBackendEnum.CUSTOM}
if not current_platform.is_cpu():
    _KV8_BACKENDS.add(AttentionBackendEnum.TRITON_ATTN)


def create_engine_config(args: EngineArgs, request: Request, build: Callable[[EngineArgs], VllmConfig]) -> VllmConfig:
    """The VllmConfig of `args` with the preset applied. `build` is vLLM's own `create_engine_config`.

    `args` itself is left as it was, so that calling twice gives the same result. Raises `UsageError`.
    """
    options, source = _options(args, request)
    resolved = resolve(overrides=options, environ=os.environ, overrides_source=source, judge_budget=False)
    refuse_unavailable(resolved)
    resolved = offload_preset.with_flag(args, resolved)
    notes: dict[str, str] = {}  # module -> why it is off or less than it could be
    args = copy.copy(args)
    _apply_kv8(args, resolved.config.kv8, notes)
    our_attention = "kv8" not in notes and _backend(args) is AttentionBackendEnum.CUSTOM
    prune_preset.apply(args, resolved, notes, our_attention=our_attention)
    offload_preset.apply(args, resolved.config.offload, notes, our_attention=our_attention)
    _apply_passes(args, request, resolved.config, notes)
    args.additional_config = {**args.additional_config, NAME: to_dict(resolved.config)}
    if not resolved.config.linear.enabled:
        notes["linear"] = "linear.enabled=false"
    _check_model_first(args, with_kv8="kv8" not in notes, with_linear="linear" not in notes)
    config = _build(args, build)
    _apply_scheduler(config, resolved.config.scheduler, notes)
    prune_preset.settle(config, resolved, notes)
    offload_preset.let_scheduler_offload(config, resolved.config.offload)
    split_where_vllm_splits(config.compilation_config)
    checks_memory.refuse_too_little_memory(config)
    if resolved.config.strict:
        _refuse_inactive(resolved, report.in_the_way(config, notes))
    config.__dict__[_SAID] = report.startup_line(config, notes)
    logger.info(startup_line(config))
    return config


def startup_line(config: VllmConfig) -> str:
    """What `create_engine_config` has logged of its result, whether or not the log shows it."""
    return config.__dict__[_SAID]


def _refuse_inactive(resolved: Resolved, off: Mapping[str, str]) -> None:
    """In strict mode a part that is on and cannot take effect is an error; one that the user switched off is not.

    Nor is pruning if nobody asked for it: by default it is on where it can be, and much rules it out.
    """
    if not resolved.asks_for("prune"):
        off = {name: why for name, why in off.items() if name != "prune"}
    for name, why in off.items():
        if getattr(getattr(resolved.config, name), "enabled", True):  # `passes` has no such option
            raise UsageError(f"strict is set and {name} is not active: {why}; remove what is in its way, or strict")


def _build(args: EngineArgs, build: Callable[[EngineArgs], VllmConfig]) -> VllmConfig:
    """vLLM's own verdict on a configuration, as one line; the whole story stays attached as the cause."""
    try:
        return build(args)
    except UsageError:
        raise
    except (ValueError, OSError, NotImplementedError) as error:
        logger.debug("vLLM refused the configuration", exc_info=True)
        raise UsageError(f"model {args.model}: vLLM refused: {' '.join(str(error).split())}") from error


def _options(args: EngineArgs, request: Request) -> tuple[dict[str, Any], str]:
    """kvcompile's own options and the flag they came by: `--additional-config` or the request itself, never both."""
    if not isinstance(args.additional_config, dict):
        raise UsageError(
            f"--additional-config is a {type(args.additional_config).__name__}; kvcompile needs a JSON table there"
        )
    given = args.additional_config.get(NAME, {})
    if not isinstance(given, dict):
        raise UsageError(f'--additional-config "{NAME}" is {given!r}; allowed is a table of kvcompile\'s keys')
    if given and request.options:
        raise UsageError(
            f'kvcompile\'s options are given twice, in --additional-config "{NAME}" and in --compilation-config '
            f'"{NAME}"; give them in one place'
        )
    return (dict(request.options), "--compilation-config") if request.options else (given, FLAG_SOURCE)


def _backend(args: EngineArgs) -> AttentionBackendEnum | None:
    """The attention backend that the user named, by either of vLLM's two flags."""
    name = args.attention_backend or args.attention_config.backend
    if not isinstance(name, str):
        return name
    if name.lower() == "auto":
        return None
    try:
        return AttentionBackendEnum[name.upper()]
    except ValueError as error:
        raise UsageError(f"--attention-backend {name}: {error}") from None


def _apply_kv8(args: EngineArgs, config: Kv8Config, notes: dict[str, str]) -> None:
    if not config.enabled:
        notes["kv8"] = "kv8.enabled=false"
    elif args.kv_cache_dtype not in ("auto", KV8_CACHE_DTYPE):
        notes["kv8"] = f"--kv-cache-dtype {args.kv_cache_dtype} given"
    elif (backend := _backend(args)) not in _KV8_BACKENDS:
        notes["kv8"] = f"--attention-backend {backend.name} given"
    else:
        compat.refuse_foreign_attention_backend()
        args.kv_cache_dtype = KV8_CACHE_DTYPE
        if backend is None:
            args.attention_backend = AttentionBackendEnum.CUSTOM


def _apply_scheduler(config: VllmConfig, options: SchedulerConfig, notes: dict[str, str]) -> None:
    """Once vLLM has decided how it schedules: a checkpoint may bring speculative decoding of its own."""
    missing = compat.missing_of_scheduler()
    if not options.enabled:
        notes["scheduler"] = "scheduler.enabled=false"
    elif config.scheduler_config.scheduler_cls is not None:
        notes["scheduler"] = "--scheduler-cls given"
    elif config.speculative_config is not None:
        notes["scheduler"] = "speculative decoding: how many tokens a step adds is not known ahead"
    elif config.kv_transfer_config is not None and not offloads(config):
        notes["scheduler"] = "a KV connector is configured"
    elif missing:
        notes["scheduler"] = f"vLLM's scheduler has no {', '.join(missing)}"
    else:
        config.scheduler_config.scheduler_cls = SCHEDULER


def _apply_passes(args: EngineArgs, request: Request, config: KVCompileConfig, notes: dict[str, str]) -> None:
    compilation = copy.deepcopy(args.compilation_config)
    if isinstance(compilation, str):
        compilation = request.compilation_config()
    if PASS_KEY in compilation.inductor_compile_config:
        notes["passes"] = f"{PASS_KEY} given"
    else:
        options = to_dict(config)
        if "kv8" in notes or _backend(args) is not AttentionBackendEnum.CUSTOM:
            # Not ours is the attention of these layers. The pass's identity says so too, as it must: the same graph
            # is compiled to another one then.
            options["passes"]["attention_swap"] = False
        compilation.inductor_compile_config[PASS_KEY] = KVCompilePass(options)
    if current_platform.is_cpu() and compilation.pass_config.fuse_rope_kvcache_cat_mla is None:
        # vLLM turns this MLA fusion on with graph partition, and on a CPU it then fails on a name that is not there.
        compilation.pass_config.fuse_rope_kvcache_cat_mla = False
    args.compilation_config = compilation


def _check_model_first(args: EngineArgs, *, with_kv8: bool, with_linear: bool) -> None:
    """Judge the model as soon as vLLM has read its configuration, before vLLM stumbles over ours with it."""
    create_model_config = args.create_model_config

    def checked() -> Any:
        model = create_model_config()
        checks.refuse_unsupported_model(model)
        if with_kv8:
            # Not earlier: a checkpoint may have brought a speculative configuration of its own.
            checks.refuse_unsupported_with_kv8(args)
            if _backend(args) is AttentionBackendEnum.CUSTOM:
                checks.refuse_kv8_without_kernels(model, args.tensor_parallel_size)
        checks.refuse_unservable_linears(args, model, with_linear=with_linear)
        return model

    args.create_model_config = checked
