"""What kvcompile refuses at start-up, each with one line: what was given, what is allowed, what to do.

Refused by name rather than half-supported. These checks run in the process that parses the command line, before a
worker is started, so that nothing is left behind.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
from pathlib import Path

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kvcompile.config import UsageError
from kvcompile.ops.kv8 import HEAD_SIZES

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_WITHOUT = "serve it without --compilation-config kvcompile"


def refuse_missing_checkpoint(model: str) -> None:
    """A local path must hold a config.json; a name without a folder behind it is left to vLLM (a hub id)."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"model {model}: the folder has no config.json; give a Hugging Face checkpoint")
    elif path.exists():
        raise UsageError(f"model {model}: is a file; give the folder of a Hugging Face checkpoint")
    elif path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise UsageError(f"model {model}: no such folder; give the folder of a Hugging Face checkpoint or a hub name")


def refuse_unsupported_model(model: ModelConfig) -> None:
    """Decoder-only, full causal attention, a known head size: what the KV8 operators are written and tested for."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise UsageError(
            f"model {model.model}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}; "
            f"{_WITHOUT}"
        )
    reasons = {
        "pooling models": model.runner_type != "generate",
        "multi-head latent attention": model.use_mla,
        "sliding-window attention": model.get_sliding_window() is not None,
        "ALiBi": model.uses_alibi,
        "attention logit soft-capping": bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
    }
    for what, found in reasons.items():
        if found:
            raise UsageError(
                f"model {model.model}: has {what}, which is not supported; supported is full causal attention; "
                f"{_WITHOUT}"
            )
    if (size := model.get_head_size()) not in HEAD_SIZES:
        raise UsageError(
            f"model {model.model}: head size {size} is not supported; supported are "
            f"{', '.join(map(str, HEAD_SIZES))}; {_WITHOUT}"
        )


def refuse_unsupported_with_kv8(args: EngineArgs) -> None:
    """vLLM features that have not been made to work with the int8 cache: refused together, each by its flag."""
    given = {
        "--enable-lora": args.enable_lora,
        "--speculative-config": args.speculative_config is not None,
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--kv-offloading-size": args.kv_offloading_size is not None,
        "--decode-context-parallel-size": args.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": args.prefill_context_parallel_size > 1,
        "--kv-sharing-fast-prefill": args.kv_sharing_fast_prefill,
        "--calculate-kv-scales": args.calculate_kv_scales,
        "--kv-cache-dtype-skip-layers": bool(args.kv_cache_dtype_skip_layers),
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{flag} does not work with the int8 KV cache of kvcompile; remove it, or keep vLLM's KV cache with "
                "-cc.kvcompile.kv8.enabled=false"
            )


def refuse_too_little_memory(config: VllmConfig) -> None:
    """One request of `max_model_len` tokens and the weights must fit, as vLLM will ask later in another process.

    Compares what is certain only (the checkpoint's own size, no activations), so that it never refuses what would run.
    """
    cache, model = config.cache_config, config.model_config
    total = current_platform.get_device_total_memory()
    need = request_bytes(config, model.max_model_len)
    fixed = cache.kv_cache_memory_bytes
    if fixed is not None:
        have, source = fixed, f"--kv-cache-memory-bytes {fixed}"
    else:
        weights = sum(f.stat().st_size for f in Path(model.model).glob("*.safetensors"))
        weights //= config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size
        share = cache.gpu_memory_utilization
        have = int(total * share) - weights
        source = f"{share:.0%} of {_gib(total)} less {_gib(weights)} of weights"
        _refuse_occupied_host_memory(share)
    if need > have:
        fits = max(have, 0) * model.max_model_len // need
        raise UsageError(
            f"too little memory: one request of {model.max_model_len} tokens needs {_gib(need)} of KV cache, there is "
            f"{_gib(max(have, 0))} ({source}); lower --max-model-len to at most {fits} or give more memory"
        )


def _refuse_occupied_host_memory(share: float) -> None:
    """On the CPU vLLM claims `share` of all memory and fails in its worker if that much is not free now."""
    if not current_platform.is_cpu():
        return
    free, total = current_platform.mem_get_info()
    if free < total * share:
        raise UsageError(
            f"too little memory: --gpu-memory-utilization {share:g} asks for {_gib(int(total * share))} of this host's "
            f"{_gib(total)}, {_gib(free)} are free; lower it, or set --kv-cache-memory-bytes, for instance 1G"
        )


def request_bytes(config: VllmConfig, tokens: int) -> int:
    """Bytes of KV cache, on one rank, that a request of `tokens` tokens holds (whole blocks)."""
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    per_head = size + 4 if config.cache_config.cache_dtype == "int8_per_token_head" else size * _dtype_bytes(config)
    return model.get_num_layers(parallel) * 2 * heads * per_head * -(-tokens // block) * block


def _dtype_bytes(config: VllmConfig) -> int:
    return 1 if "8" in config.cache_config.cache_dtype else config.model_config.dtype.itemsize


def refuse_port_in_use(args: argparse.Namespace) -> None:
    """Bind the port that `vllm serve` will bind, and let go of it."""
    if getattr(args, "uds", None) or getattr(args, "headless", False):
        return
    host = args.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, args.port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({os.strerror(error.errno)})"
            raise UsageError(
                f"port {args.port} of {host or 'all addresses'} {why}; give another --port, or stop what listens there"
            ) from None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
