"""Whether weights and one request of KV cache fit, judged before vLLM starts the processes that would find out."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvcompile.config import UsageError

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def refuse_too_little_memory(config: VllmConfig) -> None:
    """One request of `max_model_len` tokens and the weights must fit, as vLLM will ask later in another process.

    Compares what is certain only (the checkpoint's own size, no activations), so that it never refuses what would run.
    """
    cache, model = config.cache_config, config.model_config
    fixed, share = cache.kv_cache_memory_bytes, cache.gpu_memory_utilization
    if fixed is not None:
        have, source = fixed, f"--kv-cache-memory-bytes {fixed}"
        _refuse_occupied_host_memory(fixed, source, "lower it")
    else:
        total = current_platform.get_device_total_memory()
        weights = _weight_bytes(config)
        have, source = int(total * share) - weights, f"{share:.0%} of {_size(total)} less {_size(weights)} of weights"
        remedy = "lower it, or set --kv-cache-memory-bytes, for instance 1G"
        _refuse_occupied_host_memory(int(total * share), f"--gpu-memory-utilization {share:g}", remedy)
    if cache.cache_dtype.startswith("turboquant_"):
        return  # pages of another size than `request_bytes` knows
    # With --max-model-len auto vLLM looks for the length that fits, down to one block.
    tokens = 1 if model.original_max_model_len == -1 else model.max_model_len
    need = request_bytes(config, tokens)
    if need > have:
        fits = max(have, 0) // request_bytes(config, 1) * _block_tokens(config)
        lower = f"lower --max-model-len to at most {fits} or " if fits else ""
        raise UsageError(
            f"too little memory: one request of {tokens} tokens needs {_size(need)} of KV cache, there is "
            f"{_size(max(have, 0))} ({source}); {lower}give more memory"
        )


def _refuse_occupied_host_memory(asked: int, flag: str, remedy: str) -> None:
    """On the CPU vLLM claims all its memory at the start and fails in its worker if that much is not free now."""
    if not current_platform.is_cpu():
        return
    free, total = current_platform.mem_get_info()
    if free < asked:
        raise UsageError(
            f"too little memory: {flag} asks for {_size(asked)} of this host's {_size(total)}, {_size(free)} are free; "
            f"{remedy}"
        )


def _weight_bytes(config: VllmConfig) -> int:
    """Bytes that the weights of a local checkpoint take on one rank at least; 0 where that is not known."""
    model, parallel, offload = config.model_config, config.parallel_config, config.offload_config
    stored_as = getattr(model.hf_config, "dtype", None)
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return 0
    if model.quantization is not None and getattr(model.hf_config, "quantization_config", None) is None:
        return 0  # quantised while it is loaded
    # Not every *.safetensors: some checkpoints hold the same weights twice, as consolidated.safetensors.
    folder = Path(model.model)
    files = list(folder.glob("model-*-of-*.safetensors")) or list(folder.glob("model.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    if isinstance(stored_as, torch.dtype) and stored_as.itemsize > model.dtype.itemsize:
        stored = stored * model.dtype.itemsize // stored_as.itemsize
    return stored // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def request_bytes(config: VllmConfig, tokens: int) -> int:
    """Bytes of KV cache, on one rank, that a request of `tokens` tokens holds (whole blocks)."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    page = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
    )
    return model.get_num_layers(parallel) * page.page_size_bytes * -(-tokens // _block_tokens(config))


def _block_tokens(config: VllmConfig) -> int:
    """Tokens of a request behind one block of each rank: context parallelism spreads them over ranks."""
    parallel = config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return config.cache_config.block_size * ranks


def _size(count: int) -> str:
    unit, factor = next((u for u in _UNITS if count >= u[1]), _UNITS[-1])
    return f"{count / factor:.2f} {unit}"
