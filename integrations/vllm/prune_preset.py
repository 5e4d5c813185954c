"""Pruning in a configuration: the worker and the scheduler that it takes, and what is in its way."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kvcompile.config import Resolved, UsageError
from kvcompile.integrations.vllm import prune_reach
from kvcompile.integrations.vllm.active import PRUNING_GPU_WORKER, PRUNING_SCHEDULER, PRUNING_WORKER, SCHEDULER
from kvcompile.integrations.vllm.linear_config import W4A8Config

_SWITCH = "prune.enabled"

# What vLLM takes for each of ours.
_STOCK_WORKERS = {
    PRUNING_WORKER: "vllm.v1.worker.cpu_worker.CPUWorker",
    PRUNING_GPU_WORKER: "vllm.v1.worker.gpu_worker.Worker",
}


def apply(args: EngineArgs, resolved: Resolved, notes: dict[str, str], *, our_attention: bool) -> None:
    """Before vLLM decides on a worker: name ours, or say in `notes` why not."""
    if not resolved.config.prune.enabled:
        notes["prune"] = _switched_off(resolved)
    elif not our_attention:
        notes["prune"] = "attention is not kvcompile's"
    elif not (current_platform.is_cpu() or current_platform.is_cuda()):
        notes["prune"] = "neither on a CPU nor on an NVIDIA GPU"
    elif args.worker_cls != "auto":
        notes["prune"] = "--worker-cls given"
    elif args.pipeline_parallel_size > 1:
        # Each stage has layers of its own and comes to a step at another time, so that no rank knows of all layers
        # whether they have scored when it has to move the tokens of its own.
        notes["prune"] = "--pipeline-parallel-size given: no rank scores all layers"
    elif args.enable_dbo or args.ubatch_size > 1:
        notes["prune"] = "--enable-dbo or --ubatch-size given: a step is split in parts"
    else:
        args.worker_cls = PRUNING_WORKER if current_platform.is_cpu() else PRUNING_GPU_WORKER


def _switched_off(resolved: Resolved) -> str:
    """Nothing that the user set is ignored without a word: a budget prunes nothing by itself."""
    others = [key for key in resolved.sources if key.startswith("prune.") and key != _SWITCH]
    return f"{_SWITCH}=false" + (f", so nothing comes of {', '.join(others)}" if others else "")


def settle(config: VllmConfig, resolved: Resolved, notes: dict[str, str]) -> None:
    """Once vLLM has its scheduler and its cache: the scheduler that prunes, or vLLM's worker again and why in `notes`.

    With a scheduler class of the user's own nothing would be released. Raises UsageError for what cannot be had where
    the user asked for pruning; what is on by default alone never stands in the way of a start.
    """
    if "prune" in notes:
        resolved.refuse_small_budget(None)  # wrong with any block, and so to be told, although nothing comes of it
        return
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        resolved.refuse_small_budget(None)
        notes["prune"] = "--scheduler-cls given"
    else:
        try:
            _refuse_what_cannot_be_had(config, resolved)
        except UsageError as error:
            if resolved.asks_for("prune"):
                raise
            notes["prune"] = str(error)
    if "prune" in notes:
        config.parallel_config.worker_cls = _STOCK_WORKERS[config.parallel_config.worker_cls]
    elif scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = PRUNING_SCHEDULER


def _refuse_what_cannot_be_had(config: VllmConfig, resolved: Resolved) -> None:
    resolved.refuse_small_budget(config.cache_config.block_size)
    options = resolved.config.prune
    if options.method == "critical":
        _refuse_unknown_projections(config)
    if resolved.config.strict and (why := prune_reach.never_inline(config, options)):
        raise UsageError(f"strict is set and {why}; raise --max-num-batched-tokens, or set prune.inline=auto")


def _refuse_unknown_projections(config: VllmConfig) -> None:
    """See `prune_weights.py`: of another quantisation a layer's answer to a unit vector may not be its weight."""
    quantised = config.quant_config
    if quantised is not None and not isinstance(quantised, W4A8Config):
        raise UsageError(
            f"prune.method=critical weighs tokens by the output projections, which it knows where they are W4A8 or not "
            f"quantised; the quantization of this model is {quantised.get_name()}; choose another prune.method"
        )
