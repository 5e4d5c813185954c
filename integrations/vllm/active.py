"""Whether a vLLM configuration is kvcompile's, and what it says: read in every process, so kept light."""

from __future__ import annotations

from vllm.config import VllmConfig

from kvcompile.presets import NAME

# vLLM's own name for int8 K and V with one fp32 scale per token and KV head, stored behind each head vector.
KV8_CACHE_DTYPE = "int8_per_token_head"
# The name under which vLLM knows W4A8 checkpoints, and by which a user asks for their making while loading.
W4A8_QUANTIZATION = "kvcompile_w4a8"
# What vLLM calls to make the KV-length-aware scheduler.
SCHEDULER = "kvcompile.integrations.vllm.scheduler.make_scheduler"
# The same where requests are pruned and vLLM's own order is to stay.
PRUNING_SCHEDULER = "kvcompile.integrations.vllm.scheduler.make_pruning_scheduler"
# The workers whose requests are pruned, of a CPU and of a GPU.
PRUNING_WORKER = "kvcompile.integrations.vllm.prune_worker.PruningCPUWorker"
PRUNING_GPU_WORKER = "kvcompile.integrations.vllm.prune_worker_gpu.PruningGPUWorker"
# The KV connector that copies blocks of preempted requests to the host, by the name that --kv-transfer-config takes.
OFFLOAD_CONNECTOR = "KVCompileOffload"
# The scheduler where requests are offloaded, not pruned, and vLLM's own order is to stay.
OFFLOADING_SCHEDULER = "kvcompile.integrations.vllm.scheduler.make_offloading_scheduler"


def is_active(config: VllmConfig) -> bool:
    """True if the preset built `config`: `additional_config` then carries the resolved configuration."""
    return isinstance(config.additional_config, dict) and NAME in config.additional_config


def prunes(config: VllmConfig) -> bool:
    """True if requests of `config` are pruned."""
    return config.parallel_config.worker_cls in (PRUNING_WORKER, PRUNING_GPU_WORKER)


def offloads(config: VllmConfig) -> bool:
    """True if preempted requests of `config` are saved on the host."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == OFFLOAD_CONNECTOR
