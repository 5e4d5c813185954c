"""From a request to vLLM's configuration: fill in what the user left at its default, verify, report.

A value that the user gave always wins; what it costs kvcompile is said in the start-up line.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompile.config import Kv8Config, KVCompileConfig, UsageError, resolve, to_dict
from kvcompile.integrations.vllm import checks, compat, report
from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass
from kvcompile.integrations.vllm.request import Request
from kvcompile.presets import NAME, refuse_unavailable

logger = init_logger("vllm.kvcompile")

# Backends that read and write that layout: ours, and vLLM's own Triton kernels.
_KV8_BACKENDS = (None, AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TRITON_ATTN)


def create_engine_config(args: EngineArgs, request: Request, build: Callable[[EngineArgs], VllmConfig]) -> VllmConfig:
    """The VllmConfig of `args` with the preset applied. `build` is vLLM's own `create_engine_config`.

    `args` itself is left as it was, so that calling twice gives the same result. Raises `UsageError`.
    """
    resolved = resolve(overrides=_options(args, request), environ=os.environ)
    refuse_unavailable(resolved)
    notes: dict[str, str] = {}  # module -> why it is off or less than it could be
    args = copy.copy(args)
    _apply_kv8(args, resolved.config.kv8, notes)
    _apply_passes(args, request, resolved.config, notes)
    args.additional_config = {**args.additional_config, NAME: to_dict(resolved.config)}
    _check_model_first(args)
    config = _build(args, build)
    checks.refuse_too_little_memory(config)
    logger.info(report.startup_line(config, resolved.config, notes))
    return config


def _build(args: EngineArgs, build: Callable[[EngineArgs], VllmConfig]) -> VllmConfig:
    """vLLM's own verdict on a configuration, as one line; the whole story stays attached as the cause."""
    try:
        return build(args)
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        logger.debug("vLLM refused the configuration", exc_info=True)
        raise UsageError(f"vLLM refused the configuration: {' '.join(str(error).split())}") from error


def _options(args: EngineArgs, request: Request) -> dict[str, Any]:
    """kvcompile's own options, from `--additional-config` or from the request itself; both at once is an error."""
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
    return given or dict(request.options)


def _backend(args: EngineArgs) -> AttentionBackendEnum | None:
    """The attention backend that the user named, by either of vLLM's two flags."""
    name = args.attention_backend or args.attention_config.backend
    if isinstance(name, str):
        return None if name.lower() == "auto" else AttentionBackendEnum[name.upper()]
    return name


def _apply_kv8(args: EngineArgs, config: Kv8Config, notes: dict[str, str]) -> None:
    if not config.enabled:
        notes["kv8"] = "kv8.enabled=false"
    elif args.kv_cache_dtype not in ("auto", KV8_CACHE_DTYPE):
        notes["kv8"] = f"--kv-cache-dtype {args.kv_cache_dtype} given"
    elif (backend := _backend(args)) not in _KV8_BACKENDS:
        notes["kv8"] = f"--attention-backend {backend.name} given"
    else:
        checks.refuse_unsupported_with_kv8(args)
        compat.refuse_foreign_attention_backend()
        args.kv_cache_dtype = KV8_CACHE_DTYPE
        if backend is None:
            args.attention_backend = AttentionBackendEnum.CUSTOM


def _apply_passes(args: EngineArgs, request: Request, config: KVCompileConfig, notes: dict[str, str]) -> None:
    compilation = copy.deepcopy(args.compilation_config)
    if isinstance(compilation, str):
        compilation = request.compilation_config()
    if PASS_KEY in compilation.inductor_compile_config:
        notes["passes"] = f"{PASS_KEY} given"
    else:
        compilation.inductor_compile_config[PASS_KEY] = KVCompilePass(to_dict(config))
    if current_platform.is_cpu() and compilation.pass_config.fuse_rope_kvcache_cat_mla is None:
        # vLLM turns this MLA fusion on with graph partition, and on a CPU it then fails on a name that is not there.
        compilation.pass_config.fuse_rope_kvcache_cat_mla = False
    args.compilation_config = compilation


def _check_model_first(args: EngineArgs) -> None:
    """Judge the model as soon as vLLM has read its configuration, before vLLM stumbles over ours with it."""
    create_model_config = args.create_model_config

    def checked() -> Any:
        model = create_model_config()
        checks.refuse_unsupported_model(model)
        return model

    args.create_model_config = checked
