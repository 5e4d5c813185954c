"""What kvcompile refuses at start-up, each with one line: what was given, what is allowed, what to do.

Refused by name rather than half-supported. These checks run in the process that parses the command line, before a
worker is started, so that nothing is left behind.
"""

from __future__ import annotations

import argparse
import errno
import json
import socket
from collections.abc import Mapping

from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import try_get_local_file

from kvcompile.config import UsageError, shown
from kvcompile.integrations.vllm.active import OFFLOAD_CONNECTOR, W4A8_QUANTIZATION
from kvcompile.integrations.vllm.linear_config import NO_LORA, W4A8Config
from kvcompile.integrations.vllm.request import request_of
from kvcompile.llama import ARCHITECTURES
from kvcompile.model_path import refuse_missing_checkpoint
from kvcompile.ops import nvrtc
from kvcompile.ops.kv8 import HEAD_SIZES
from kvcompile.ops.kv8.decode_shape import SHARED_BYTES, decode_shape

# What vLLM merges in each of them.
_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

_WITHOUT = "serve it without --compilation-config kvcompile"


def refuse_before_serving(args: argparse.Namespace) -> None:
    """What `vllm serve` would find out with a stack trace before it has built its configuration."""
    args.model = getattr(args, "model_tag", None) or args.model  # as vLLM's own command does first
    refuse_missing_checkpoint(args.model)
    refuse_port_in_use(args)
    try:
        AsyncEngineArgs.from_cli_args(args)
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(
            f"vLLM refused the arguments for model {args.model}: {' '.join(str(error).split())}"
        ) from error


def refuse_unsupported_model(model: ModelConfig) -> None:
    """Decoder-only, full causal attention, a known head size: what the KV8 operators are written and tested for."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise UsageError(
            f"model {model.model}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}; "
            f"{_WITHOUT}"
        )
    text = model.hf_text_config
    reasons = {
        "a pooling runner": model.runner_type != "generate",
        "multi-head latent attention": model.use_mla,
        "sliding-window attention": model.get_sliding_window() is not None,
        "ALiBi": model.uses_alibi,
        "attention logit soft-capping": bool(getattr(text, "attn_logit_softcapping", None)),
        "dual-chunk attention": getattr(text, "dual_chunk_attention_config", None) is not None,
        "bidirectional attention": not getattr(text, "is_causal", True),
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
        "--kv-transfer-config": args.kv_transfer_config is not None
        and getattr(args.kv_transfer_config, "kv_connector", None) != OFFLOAD_CONNECTOR,
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


def refuse_kv8_without_kernels(model: ModelConfig, ranks: int) -> None:
    """On a GPU the cache has kernels of its own: what compiles them has to be there, and heads have to fit the GPU."""
    if current_platform.is_cpu():
        return
    remedy = "keep vLLM's KV cache with -cc.kvcompile.kv8.enabled=false"
    try:
        nvrtc.require()
    except nvrtc.CompilerMissing as error:
        raise UsageError(f"{error}; or {remedy}") from error
    capability = current_platform.get_device_capability()
    shared = SHARED_BYTES.get(tuple(capability)) if capability else None
    heads = max(1, model.get_total_num_kv_heads() // ranks)
    ratio = max(1, model.model_arch_config.total_num_attention_heads // ranks) // heads
    if shared and decode_shape(model.get_head_size(), heads, ratio, shared) is None:
        raise UsageError(
            f"model {model.model}: {heads} KV heads of {model.get_head_size()} with {ratio} query heads each do not "
            f"fit a GPU of compute capability {capability.as_version_str()}; {remedy}, or use more ranks"
        )


def refuse_malformed_description(args: EngineArgs) -> None:
    """A `quantization_config` that vLLM itself would stumble over, where kvcompile or W4A8 is asked for or mentioned.

    Judged for a config.json that is on this machine; of other models, and of one that is no JSON, vLLM speaks itself.
    """
    file = try_get_local_file(args.hf_config_path or args.model, "config.json", args.revision)
    if file is None:
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return
    described = config.get("quantization_config") if isinstance(config, dict) else None
    w4a8 = args.quantization == W4A8_QUANTIZATION or W4A8_QUANTIZATION in json.dumps(described).lower()
    # null is what vLLM takes for an unquantised checkpoint
    if described is None or not (w4a8 or request_of(args.compilation_config) is not None):
        return
    if not isinstance(described, Mapping):
        found = f"is {shown(described)}"
    elif "quant_method" not in described:
        found = "has no quant_method" if w4a8 else None  # which vLLM takes for an unquantised checkpoint too
    elif not isinstance(method := described["quant_method"], str) or (w4a8 and not method):
        found = f"has the quant_method {shown(method)}"
    else:
        return
    if found is None:
        return
    if not w4a8:
        raise UsageError(
            f"model {args.model}: quantization_config in config.json {found}; allowed is a table whose quant_method is "
            "a name, or none at all for a checkpoint that is not quantised; get the checkpoint again"
        )
    raise UsageError(
        f"model {args.model}: quantization_config in config.json {found}; allowed is a table with the quant_method "
        f'"{W4A8_QUANTIZATION}", or none at all for a checkpoint that is not quantised; quantise it anew with '
        "`kvcompile quantize`"
    )


def refuse_unservable_linears(args: EngineArgs, model: ModelConfig, *, with_linear: bool = True) -> None:
    """What of a W4A8 checkpoint can be judged without its weights: its own description, and how it meets `args`."""
    if model.quantization != W4A8_QUANTIZATION:
        return
    if args.enable_lora:
        raise UsageError(NO_LORA)
    described = getattr(model.hf_config, "quantization_config", None)
    if not with_linear:
        raise UsageError(
            f"model {model.model}: linear.enabled is false, but "
            + (
                f"--quantization {W4A8_QUANTIZATION} is given; remove one of the two"
                if described is None
                else "its weights are W4A8 and nothing else can serve them; remove linear.enabled=false, or serve the "
                "checkpoint that it was made from"
            )
        )
    config = W4A8Config() if described is None else W4A8Config.from_config(described)
    config.packed_modules_mapping = _MERGED  # vLLM itself sets it in the worker only
    text, ranks = model.hf_text_config, args.tensor_parallel_size
    config.refuse_unknown_skipped(text.num_hidden_layers)
    for i in range(text.num_hidden_layers):
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
            config.skips(f"model.layers.{i}.{name}")
    heads = model.model_arch_config.total_num_attention_heads * model.get_head_size()
    for block, name, width, cut in (
        ("self_attn", "o_proj", heads, ranks),
        ("mlp", "down_proj", text.intermediate_size, ranks),
        ("self_attn", "qkv_proj", text.hidden_size, 1),  # these two are cut along their output
        ("mlp", "gate_up_proj", text.hidden_size, 1),
    ):
        # A checkpoint has no group size for a width that only skipped layers have.
        quantised = not all(config.skips(f"model.layers.{i}.{block}.{name}") for i in range(text.num_hidden_layers))
        if quantised and width % cut == 0:  # otherwise vLLM refuses the number of ranks itself
            config.group_on_rank(name, width, cut)


def refuse_port_in_use(args: argparse.Namespace) -> None:
    """Bind the port that `vllm serve` will bind, and let go of it."""
    if getattr(args, "uds", None) or getattr(args, "headless", False):
        return
    host = args.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, args.port))
    except OverflowError:
        raise UsageError(f"port {args.port} is no port; allowed are 0 to 65535; give another --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is in use; give another --port, or stop what listens there"
        else:
            why = f"cannot be bound ({error.strerror or error}); give another --host or --port"
        raise UsageError(f"port {args.port} of {host or 'all addresses'} {why}") from None
