"""Offload in a configuration: by kvcompile's own options, or by vLLM's `--kv-transfer-config`:

{"kv_connector": "KVCompileOffload", "kv_role": "kv_both",
 "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "lazy_gpu_free_trigger": 0.35, "max_scan_reqs": 3}}
"""

from __future__ import annotations

import os
from dataclasses import asdict, fields, replace

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvcompile import host_memory
from kvcompile.config import OffloadConfig, Resolved, UsageError, resolve
from kvcompile.integrations.vllm import checks_memory, compat_offload
from kvcompile.integrations.vllm.active import OFFLOAD_CONNECTOR, OFFLOADING_SCHEDULER, offloads
from kvcompile.presets import NAME

logger = init_logger("vllm.kvcompile")

_FLAG = "--kv-transfer-config"
_ALLOCATOR, _EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
_KEYS = tuple(field.name for field in fields(OffloadConfig) if field.name != "enabled")
# What the flag may say beside them. Of a load that fails the request is computed again, whatever the policy.
_OF_FLAG = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy", "engine_id")


def asked_by_flag(args: EngineArgs) -> bool:
    """Whether `--kv-transfer-config` names our connector."""
    return getattr(args.kv_transfer_config, "kv_connector", None) == OFFLOAD_CONNECTOR  # vLLM takes a table there too


def with_flag(args: EngineArgs, resolved: Resolved) -> Resolved:
    """The configuration with what `--kv-transfer-config` says of our connector. Raises UsageError."""
    if not asked_by_flag(args):
        return resolved
    given = args.kv_transfer_config
    if given.kv_role != "kv_both":
        raise UsageError(f'{_FLAG}: kv_role is {given.kv_role!r}; allowed for {OFFLOAD_CONNECTOR} is "kv_both"')
    if others := _without_effect(given):
        raise UsageError(f"{_FLAG}: {OFFLOAD_CONNECTOR} makes nothing of {', '.join(others)}; remove it")
    if twice := [key for key in resolved.sources if key.startswith("offload.")]:
        raise UsageError(f"{', '.join(twice)} and {_FLAG} are given; give offload's options in one place")
    if unknown := [key for key in given.kv_connector_extra_config if key not in _KEYS]:
        raise UsageError(
            f"{_FLAG}: kv_connector_extra_config has {', '.join(map(repr, unknown))}; allowed are {', '.join(_KEYS)}"
        )
    own = {"offload": {"enabled": True, **given.kv_connector_extra_config}}
    read = resolve(overrides=own, environ={}, overrides_source=_FLAG).config.offload
    return replace(resolved, config=replace(resolved.config, offload=read))


def _without_effect(given: KVTransferConfig) -> list[str]:
    """Fields that are for other connectors, and are not at their defaults."""
    default = KVTransferConfig(kv_connector=OFFLOAD_CONNECTOR, kv_role="kv_both")
    names = [field.name for field in fields(KVTransferConfig) if field.name not in _OF_FLAG]
    return [name for name in names if getattr(given, name) != getattr(default, name)]


def refuse_without_kvcompile(args: EngineArgs) -> None:
    """Now, and not in another process, when vLLM makes the connector there."""
    if asked_by_flag(args):
        raise UsageError(f"{_FLAG}: {OFFLOAD_CONNECTOR} needs --compilation-config {NAME}; add it")


def apply(args: EngineArgs, config: OffloadConfig, notes: dict[str, str], *, our_attention: bool) -> None:
    """Before vLLM builds its configuration: name the connector, or say in `notes` why not."""
    by_flag = asked_by_flag(args)
    if not config.enabled:
        notes["offload"] = "offload.enabled=false"
        return
    missing = compat_offload.missing()
    reasons = {
        f"vLLM has no {', '.join(missing)}": bool(missing),
        "attention is not kvcompile's": not our_attention,
        # It gives the cache's memory away, which a copy on a stream of its own may still be using.
        "--enable-sleep-mode: not with offload on a GPU": args.enable_sleep_mode and not current_platform.is_cpu(),
        f"{_ALLOCATOR} has {_EXPANDABLE}, which vLLM allows with no KV connector": _EXPANDABLE
        in os.environ.get(_ALLOCATOR, ""),
        # What a block takes is another number on each stage, and who has copied it would be known a stage at a time.
        "--pipeline-parallel-size given: no stage has all layers of a block": args.pipeline_parallel_size > 1,
        "--scheduler-cls given": args.scheduler_cls is not None,
        "another KV connector is configured": args.kv_transfer_config is not None and not by_flag,
    }
    if why := next((reason for reason, there in reasons.items() if there), None):
        if by_flag:
            raise UsageError(
                f"{_FLAG}: {OFFLOAD_CONNECTOR} cannot be used: {why}; remove the flag, or what is in its way"
            )
        notes["offload"] = why
        return
    options = {key: value for key, value in asdict(config).items() if key in _KEYS}
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=OFFLOAD_CONNECTOR,
        kv_role="kv_both",
        engine_id=args.kv_transfer_config.engine_id if by_flag else None,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=options,
    )


def let_scheduler_offload(config: VllmConfig, options: OffloadConfig) -> None:
    """Once vLLM has its scheduler and its cache. Raises UsageError for a host pool of no use."""
    if not offloads(config):
        return
    if config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = OFFLOADING_SCHEDULER
    page = checks_memory.request_bytes(config, 1)
    if options.cpu_bytes_to_use < page:
        raise UsageError(
            f"offload.cpu_bytes_to_use is {options.cpu_bytes_to_use}, and one block of this model takes {page} bytes; "
            "give at least that, for a useful pool many times as much"
        )
    _refuse_more_than_there_is(config, options)


def _refuse_more_than_there_is(config: VllmConfig, options: OffloadConfig) -> None:
    """Now: memory is taken when it is first written to, and who then takes too much is killed while it serves."""
    parallel = config.parallel_config
    pools = parallel.local_world_size * parallel.data_parallel_size_local
    wanted = options.cpu_bytes_to_use * pools
    try:
        available = host_memory.read().available
    except OSError as error:
        logger.debug("how much memory this machine has is not known: %s", error)
        return
    if wanted > available:
        raise UsageError(
            f"offload.cpu_bytes_to_use is {options.cpu_bytes_to_use}, for {pools} worker{'s' * (pools > 1)} on this "
            f"machine {wanted} bytes, and {available} bytes of its memory are available; give at most "
            f"{available // pools}, and leave some for the model, or end what else takes memory"
        )
