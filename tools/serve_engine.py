"""An engine in a process of its own that serves what the parent asks for, one line of JSON each way.

    ready: {"blocks", "block_size", "dtype", "backend", "graphs", "asynchronous", "scheduler"}
    asked: {"prompt", "output", "requests", "seed"}      ran: {"seconds", "ttft", "tpot", "preemptions"}

The engine stays idle between two questions, so several can share a GPU and be asked in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError
from kvcompile.tools import engine_process

_MARK = "kvcompile-serve "


class Served:
    """The parent's end. Starts the process at once; `facts` waits until it is ready."""

    def __init__(self, name: str, model: Path, arguments: dict[str, Any], log: Path) -> None:
        self.name, self._log = name, log
        environment = engine_process.environment()
        command = [sys.executable, "-m", "kvcompile.tools.serve_engine", str(model), json.dumps(arguments)]
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


def _main(model: str, arguments: dict[str, Any]) -> None:
    from vllm import LLM

    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=False, **arguments)
    config = llm.llm_engine.vllm_config
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    _say(
        blocks=config.cache_config.num_gpu_blocks,
        block_size=config.cache_config.block_size,
        dtype=config.cache_config.cache_dtype,
        backend=getattr(config.attention_config.backend, "name", None),
        graphs=config.compilation_config.cudagraph_mode.name,
        asynchronous=bool(config.scheduler_config.async_scheduling),
        scheduler=f"{type(scheduler).__module__}.{type(scheduler).__name__}",
    )
    preempted = 0
    for line in sys.stdin:
        found = _serve(llm, **json.loads(line))
        so_far = _preemptions(llm)
        _say(**found, preemptions=so_far - preempted)
        preempted = so_far


def _serve(llm: Any, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams, TokensPrompt

    generator = torch.Generator().manual_seed(seed)
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


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _say(**content: Any) -> None:
    print(_MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
