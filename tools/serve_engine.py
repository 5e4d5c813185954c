"""An engine in a process of its own that serves what the parent asks for, one line of JSON each way.

    ready: `FACTS`
    asked: {"prompt", "output", "requests", "seed"}
    ran:   {"seconds", "ttft", "tpot", "preemptions", "peak_blocks", "peak_running"}, and where requests are pruned
           {"pruned_tokens", "inline_prompts", "not_pruned", "resident_tokens"}

The engine stays idle between two questions, so several can share a GPU and be asked in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError
from kvcompile.tools import engine_process

FACTS = (
    *("blocks", "block_size", "model_dtype", "linears", "dtype", "attention", "graphs", "asynchronous"),
    *("prefix_caching", "scheduler", "worker", "runner", "kvcompile", "prunes", "length_aware", "connector"),
    *("weight_bytes", "allocated_bytes", "cores"),
)
_MARK = "kvcompile-serve "
_OURS = "vllm:kvcompile_"


class Served:
    """The parent's end. Starts the process at once; `facts` waits until it is ready.

    gpu: what CUDA_VISIBLE_DEVICES says there; None leaves it. cores: CPU cores it may use; None leaves them.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        arguments: dict[str, Any],
        log: Path,
        gpu: str | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.name, self._log = name, log
        environment = engine_process.environment() | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        given = json.dumps([str(model), arguments, list(cores) if cores else None])
        command = [sys.executable, "-m", "kvcompile.tools.serve_engine", given]
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def facts(self) -> dict[str, Any]:
        """What the engine is, once it is ready."""
        return self._answer()

    def run(self, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
        """Serve `requests` of that many prompt and output tokens, all sent at once."""
        asked = {"prompt": prompt, "output": output, "requests": requests, "seed": seed}
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended while it was idle: `_answer` tells why
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            with self._log.open("a") as log:  # vLLM writes its log to standard output
                log.write(line)
        self._process.wait()
        lines = self._log.read_text().strip().splitlines() or ["no output"]
        errors = [line for line in lines if "Error" in line] or lines
        raise UsageError(f"{self.name}: the engine ended: {errors[-1].strip()}; its log is {self._log}")


def _main(model: str, arguments: dict[str, Any], cores: list[int] | None) -> None:
    if cores:
        os.sched_setaffinity(0, cores)  # before any thread is started
    from vllm import LLM

    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=False, **arguments)
    spare_connector_metrics(llm.llm_engine.logger_manager)
    _say(**_facts(llm))
    counted = _Counted(llm)
    for line in sys.stdin:
        found = _serve(llm, **json.loads(line))
        _say(**found, **counted.since_last())


def spare_connector_metrics(metrics: Any) -> None:
    """Give vLLM's metrics (its `StatLoggerManager`) of its offloading connector what they expect.

    They take operations as these come out of a message, as dicts; in an engine of one process there is no message, and
    the first copy would end the engine.
    """
    metrics.record = functools.partial(_record_dicts, metrics.record)


def _record_dicts(record: Callable[..., None], scheduler_stats: Any, *others: Any, **named: Any) -> None:
    def plain(item: Any) -> Any:
        return dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item

    found = getattr(scheduler_stats, "kv_connector_stats", None)
    if found:
        plainly = {k: [plain(item) for item in v] if isinstance(v, list) else v for k, v in found.items()}
        scheduler_stats = dataclasses.replace(scheduler_stats, kv_connector_stats=plainly)
    record(scheduler_stats, *others, **named)


def _facts(llm: Any) -> dict[str, Any]:
    import torch

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (loaded,) = llm.apply_model(_loaded)
    found = {
        **of_config(llm.llm_engine.vllm_config),
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
        "allocated_bytes": torch.cuda.memory_allocated(),
        "cores": len(os.sched_getaffinity(0)),
        **loaded,
    }
    return {name: found[name] for name in FACTS}


def of_config(config: Any) -> dict[str, Any]:
    """The facts that a VllmConfig tells."""
    from kvcompile.integrations.vllm import active

    cache, transfer = config.cache_config, config.kv_transfer_config
    return {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "model_dtype": str(config.model_config.dtype).removeprefix("torch."),
        "dtype": cache.cache_dtype,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "worker": config.parallel_config.worker_cls,
        "runner": "V2" if config.use_v2_model_runner else "V1",  # vLLM takes V1 for quantised models, V2 for others
        "kvcompile": active.is_active(config),
        "prunes": active.prunes(config),
        "length_aware": config.scheduler_config.scheduler_cls == active.SCHEDULER,
        "connector": transfer.kv_connector if transfer else None,
    }


def _loaded(model: Any) -> dict[str, Any]:
    """What the layers of a loaded model are, whatever the configuration says. Several kinds are joined by "+"."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase

    storages, linears, attention = {}, set(), set()
    for tensor in (*model.parameters(), *model.buffers()):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for layer in model.modules():
        if isinstance(layer, LinearBase):
            weight = max(layer.parameters(), key=lambda parameter: parameter.nbytes)
            linears.add(str(weight.dtype).removeprefix("torch."))
        if isinstance(layer, Attention):
            attention.add(layer.attn_backend.get_name())
    return {
        "weight_bytes": sum(storages.values()),
        "linears": "+".join(sorted(linears)),
        "attention": "+".join(sorted(attention)),
    }


class _Counted:
    """What an engine counts by itself and what its scheduler holds, from one question to the next.

    The scheduler is looked at once a step, after it has handed out the step's blocks, which is when it holds most.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._before = llm, _metrics(llm)
        self._blocks = self._running = 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        pool, schedule = scheduler.kv_cache_manager.block_pool, scheduler.schedule

        def watched() -> Any:
            output = schedule()
            self._blocks = max(self._blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
            self._running = max(self._running, len(scheduler.running))
            return output

        scheduler.schedule = watched

    def since_last(self) -> dict[str, Any]:
        now = _metrics(self._llm)
        new = {name: value - self._before[name] for name, value in now.items()}
        found = {
            "preemptions": int(new["vllm:num_preemptions"]),
            "peak_blocks": self._blocks,
            "peak_running": self._running,
        }
        self._before, self._blocks, self._running = now, 0, 0
        if _OURS + "pruned_tokens" in new:
            ended = new[_OURS + "request_resident_kv_tokens count"]
            found |= {
                "pruned_tokens": int(new[_OURS + "pruned_tokens"]),
                "inline_prompts": int(new[_OURS + "prune_inline_prompts"]),
                "not_pruned": int(new[_OURS + "prune_refusals"] + new[_OURS + "prune_scoring_failures"]),
                "resident_tokens": new[_OURS + "request_resident_kv_tokens sum"] / max(ended, 1),
            }
        return found


def _metrics(llm: Any) -> Counter[str]:
    """Counters by name, summed over their labels; of a histogram its count and sum."""
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            found[metric.name] += metric.value
        elif hasattr(metric, "sum"):
            found[f"{metric.name} count"] += metric.count
            found[f"{metric.name} sum"] += metric.sum
    return found


def _serve(llm: Any, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams, TokensPrompt

    # No two cases begin with the same tokens: a host pool would know them.
    generator = torch.Generator().manual_seed(seed << 40 | prompt << 20 | output)
    vocabulary = llm.model_config.get_vocab_size()
    tokens = torch.randint(3, vocabulary, (requests, prompt), generator=generator).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in tokens], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    short = [len(o.outputs[0].token_ids) for o in outputs if len(o.outputs[0].token_ids) != output]
    if short:
        raise RuntimeError(f"{len(short)} requests gave {min(short)} tokens or more instead of {output}")
    stats = [o.metrics for o in outputs]
    steps = max(output - 1, 1)
    return {
        "seconds": seconds,
        "ttft": [s.first_token_latency for s in stats],
        "tpot": [(s.last_token_ts - s.first_token_ts) / steps for s in stats],
    }


def _say(**content: Any) -> None:
    print(_MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
