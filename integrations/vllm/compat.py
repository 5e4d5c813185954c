"""Every place where kvcompile reaches into vLLM 0.23: what to look at first when vLLM moves.

What is repeated of vLLM's code, where it is too slow for a decode step, `compat_sources.py` has.
`install` wraps vLLM's functions once per process. Each wrapper returns vLLM's own result, untouched, as long as the
configuration at hand does not ask for kvcompile.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import sys
from typing import Any

from kvcompile.config import UsageError
from kvcompile.presets import NAME

_CUSTOM_BACKEND = "kvcompile.integrations.vllm.attention.KV8AttentionBackend"
_installed = False

# What `scheduler.py` takes from vLLM's scheduler beyond its interface. It relies, too, on `schedule()` taking victims
# from the end of `running` under FCFS, asking `_select_waiting_queue_for_scheduling` before each admission and for
# nothing else, and ending its admissions when `kv_cache_manager.allocate_slots` gives None.
_OF_SCHEDULER = ("_select_waiting_queue_for_scheduling", "_inflight_prefills", "current_step", "finished_req_ids")
_OF_CACHE_MANAGER = ("allocate_slots", "get_blocks", "empty_kv_cache_blocks", "coordinator", "block_pool")


def install() -> None:
    """Wrap vLLM's entry points in this process. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.platforms import current_platform

    from kvcompile.integrations.vllm import linear_hooks

    _wrap_command_line()
    _wrap_engine_config()
    _wrap_request_validation()
    _wrap_statistics()
    _register_attention_backend()
    _register_quantization()
    _register_offload_connector()
    linear_hooks.install()
    _wrap_compile_cache_key()
    if current_platform.is_cpu():
        _wrap_cpu_platform()
        _spare_cpu_the_functionalization_fix()


def _wrap_command_line() -> None:
    """`--compilation-config` learns the word kvcompile; `vllm serve` ends with one line on a user's mistake."""
    from vllm.engine.arg_utils import EngineArgs

    from kvcompile.integrations.vllm.request import CompilationConfigAction

    add_cli_args = EngineArgs.add_cli_args

    @functools.wraps(add_cli_args)
    def wrapped(parser: Any) -> Any:
        parser = add_cli_args(parser)
        CompilationConfigAction.install(parser)
        return parser

    EngineArgs.add_cli_args = staticmethod(wrapped)
    # Only the `vllm` command has this module loaded, and it looks `cmd` up after loading plugins.
    if "vllm.entrypoints.cli.serve" in sys.modules:
        serve = sys.modules["vllm.entrypoints.cli.serve"].ServeSubcommand
        serve.cmd = staticmethod(_serve(serve.cmd))


def _serve(cmd: Any) -> Any:
    @functools.wraps(cmd)
    def wrapped(args: argparse.Namespace) -> None:
        from kvcompile.integrations.vllm.request import request_of

        try:
            if request_of(args.compilation_config) is not None:
                from kvcompile.integrations.vllm import checks

                checks.refuse_before_serving(args)
            return cmd(args)
        except UsageError as error:
            # Past sys.stderr, in front of whose lines vLLM puts the name and number of the process.
            os.write(2, f"kvcompile: error: {error}\n".encode())
            raise SystemExit(2) from None

    return wrapped


def _wrap_engine_config() -> None:
    """Both `vllm serve` and `LLM(...)` build their configuration here: where the preset is applied."""
    from vllm.engine.arg_utils import EngineArgs

    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(create_engine_config)
    def wrapped(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from kvcompile.integrations.vllm import linear_report, offload_preset, preset
        from kvcompile.integrations.vllm.request import request_of

        request = request_of(self.compilation_config)
        if request is None:
            if isinstance(self.additional_config, dict) and NAME in self.additional_config:
                raise UsageError(
                    f'--additional-config has a "{NAME}" table but kvcompile is not asked for; '
                    f"add --compilation-config {NAME}, or remove the table"
                )
            offload_preset.refuse_without_kvcompile(self)
            config = create_engine_config(self, *args, **kwargs)
            linear_report.say_what_is_off(config)
            return config
        return preset.create_engine_config(self, request, lambda ready: create_engine_config(ready, *args, **kwargs))

    EngineArgs.create_engine_config = wrapped


def _wrap_request_validation() -> None:
    """What a request asks of pruning is judged where vLLM judges its sampling parameters: a server answers 400."""
    from vllm.v1.engine.input_processor import InputProcessor

    validate = InputProcessor._validate_params

    @functools.wraps(validate)
    def wrapped(self: InputProcessor, params: Any, *args: Any, **kwargs: Any) -> None:
        from kvcompile.integrations.vllm import prune_request

        validate(self, params, *args, **kwargs)
        prune_request.refuse_wrong(self.vllm_config, params)

    InputProcessor._validate_params = wrapped


def _wrap_statistics() -> None:
    """What kvcompile's schedulers count comes with vLLM's statistics and is shown by its Prometheus logger.

    Not a plug-in of the group `vllm.stat_logger_plugins`: an `LLM` loads none, and any makes `vllm serve` gather
    statistics that --disable-log-stats has switched off, with or without kvcompile.
    """
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerManager

    init = StatLoggerManager.__init__

    @functools.wraps(init)
    def wrapped(self: StatLoggerManager, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from kvcompile.integrations.vllm import metrics

        init(self, vllm_config, *args, **kwargs)
        metrics.show(self, vllm_config)

    engine_init = LLMEngine.__init__

    @functools.wraps(engine_init)
    def wrapped_engine(self: LLMEngine, *args: Any, **kwargs: Any) -> None:
        from kvcompile.integrations.vllm import metrics

        engine_init(self, *args, **kwargs)
        metrics.show_every_step(self)

    StatLoggerManager.__init__, LLMEngine.__init__ = wrapped, wrapped_engine


def _register_attention_backend() -> None:
    """CUSTOM is vLLM's name for a backend from outside; it is used only where a configuration names it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _CUSTOM_BACKEND)


def _register_quantization() -> None:
    """A W4A8 checkpoint names this quantisation itself, so vLLM must know it whether or not kvcompile is asked for."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from kvcompile.integrations.vllm.active import W4A8_QUANTIZATION
    from kvcompile.integrations.vllm.linear_config import W4A8Config

    register_quantization_config(W4A8_QUANTIZATION)(W4A8Config)


def _register_offload_connector() -> None:
    """--kv-transfer-config may name it, and a configuration that does is read in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvcompile.integrations.vllm.active import OFFLOAD_CONNECTOR

    module = "kvcompile.integrations.vllm.offload_connector"
    KVConnectorFactory.register_connector(OFFLOAD_CONNECTOR, module, OFFLOAD_CONNECTOR)


def _wrap_compile_cache_key() -> None:
    """vLLM's key for compiled graphs holds a checkpoint's path and the name of its quantisation, no more.

    What else config.json says of it is lost (transformers 5 keeps it outside the fields that vLLM hashes), so that a
    checkpoint quantised anew in the same folder would be served by the graphs of the one before.
    """
    from vllm.config import VllmConfig

    from kvcompile.integrations.vllm.linear_config import W4A8Config

    compute_hash = VllmConfig.compute_hash

    @functools.wraps(compute_hash)
    def wrapped(self: VllmConfig) -> str:
        key = compute_hash(self)
        if not isinstance(self.quant_config, W4A8Config):
            return key
        return hashlib.sha256(f"{key} {self.quant_config.identity()}".encode()).hexdigest()[: len(key)]

    VllmConfig.compute_hash = wrapped


def missing_of_scheduler() -> list[str]:
    """Names that the KV-length-aware scheduler needs and that vLLM's classes do not have, in code or attributes."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = names_of(Scheduler, Scheduler.__init__, Scheduler.schedule)
    manager = names_of(KVCacheManager, KVCacheManager.__init__)
    return [name for name in _OF_SCHEDULER if name not in scheduler] + [
        name for name in _OF_CACHE_MANAGER if name not in manager
    ]


def names_of(cls: type, *methods: Any) -> set[str]:
    """What a class has, and what these methods of it name: attributes that they set, too."""
    return {*dir(cls), *(name for method in methods for name in method.__code__.co_names)}


def refuse_foreign_attention_backend() -> None:
    """Raise `UsageError` if another plugin holds the one CUSTOM backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if (path := AttentionBackendEnum.CUSTOM.get_path()) != _CUSTOM_BACKEND:
        raise UsageError(
            f"another plugin has registered vLLM's CUSTOM attention backend ({path}); remove it, or set "
            "-cc.kvcompile.kv8.enabled=false"
        )


def _wrap_cpu_platform() -> None:
    """The CPU platform ignores the chosen attention backend and replaces VLLM_COMPILE; give kvcompile both back."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvcompile.integrations.vllm.active import KV8_CACHE_DTYPE, is_active

    get_attn_backend_cls = CpuPlatform.get_attn_backend_cls.__func__
    check_and_update_config = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(get_attn_backend_cls)
    def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if (
            selected_backend == AttentionBackendEnum.CUSTOM
            and attn_selector_config.kv_cache_dtype == KV8_CACHE_DTYPE
            and AttentionBackendEnum.CUSTOM.get_path() == _CUSTOM_BACKEND
        ):
            return _CUSTOM_BACKEND
        return get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads)

    @functools.wraps(check_and_update_config)
    def update(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        wanted, backend_name, wrap = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        check_and_update_config(cls, vllm_config)
        if not is_active(vllm_config) or wanted != CompilationMode.VLLM_COMPILE or vllm_config.lora_config is not None:
            return
        compilation.mode, compilation.backend = wanted, backend_name
        # The pass manager sees norms only as vLLM's IR nodes; and no size but the dynamic one is compiled by default.
        compilation.ir_enable_torch_wrap = wrap
        compilation.compile_sizes = compilation.compile_sizes or []

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    CpuPlatform.check_and_update_config = classmethod(update)


def _spare_cpu_the_functionalization_fix() -> None:
    """That pass names CUDA operators which the CPU build does not have, and fails on them.

    It only saves copies around vLLM's own mutating CUDA operators, none of which is in a CPU graph; what is left
    functionalised, Inductor lowers correctly. Stock vLLM never runs its pass manager on a CPU.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

    FixFunctionalizationPass.__call__ = lambda self, graph: None
