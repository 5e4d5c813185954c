"""Whether the head of a W4A8 model is served in int8, and what the start-up line says of it."""

from __future__ import annotations

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kvcompile.config import LM_HEAD_INT8_ROWS, UsageError
from kvcompile.integrations.vllm.active import is_active
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.llama import ARCHITECTURES
from kvcompile.presets import NAME

HIDDEN_STEP = 128  # channels that vLLM's Marlin kernel takes at a time


def why_not(config: VllmConfig, quantisation: W4A8Config, hidden: int) -> str | None:
    """Why the head stays as the checkpoint has it; None if it becomes int8. hidden: its input channels.

    Raises UsageError where int8 was asked for and there is no kernel for it.
    """
    text = None if config.model_config is None else config.model_config.hf_text_config
    asked = config.additional_config[NAME]["linear"]["lm_head_int8"] if is_active(config) else "auto"
    if asked == "never":
        return "linear.lm_head_int8=never"
    if getattr(text, "tie_word_embeddings", False):
        return "tied to the embedding"
    if "lm_head" in quantisation.skipped:
        return "modules_to_not_convert has it"
    if asked == "auto" and (slower := _why_slower(config)):
        return slower
    why = None if current_platform.is_cpu() else _why_no_kernel(hidden)
    if why and asked == "always":
        raise UsageError(f"linear.lm_head_int8 is always, which cannot be: {why}; set auto or never")
    return why


def said(config: VllmConfig) -> str:
    """For the start-up line, behind what is said of the linears; empty for models of which nothing is known here."""
    model = config.model_config
    if model.architecture not in ARCHITECTURES:
        return ""
    why = why_not(config, config.quant_config, model.get_hidden_size())
    return ", lm_head int8" if why is None else f", lm_head as it is: {why}"


def _why_slower(config: VllmConfig) -> str | None:
    """A step has a row of logits for each request that runs. Measured on an H200 alone, 128,256 x 4,096, us: Marlin 224
    and cuBLAS in bf16 273 at 64 rows, 520 and 266 at 128 (benchmarks/NOTES.md).
    """
    if current_platform.is_cpu():  # what is tried there is what a GPU would serve
        return None
    rows = config.scheduler_config.max_num_seqs
    return (
        f"--max-num-seqs is {rows}, and int8 is slower for more than {LM_HEAD_INT8_ROWS} rows"
        if rows > LM_HEAD_INT8_ROWS
        else None
    )


def _why_no_kernel(hidden: int) -> str | None:
    from vllm import _custom_ops  # noqa: F401, it loads vLLM's operators

    if not current_platform.is_cuda() or not hasattr(torch.ops._C, "marlin_gemm"):
        return "this vLLM has no Marlin kernel"
    if hidden % HIDDEN_STEP:
        return f"hidden size {hidden}, of which Marlin takes multiples of {HIDDEN_STEP}"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and Marlin's sums depend on the batch"
    return None
