"""Engines that compile their model, one after the other in a process of their own, and what is in the code they run.

What a pass did is read off the code that Inductor generated, not off anything that kvcompile counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine import run_python

# Arguments: engines as JSON, each {model, arguments of LLM, fields of its compilation configuration, decode_steps}; the
# prompts' tokens; and a file for the inputs of the fused operators on a CPU. Prints one JSON line for each engine.
SCRIPT = """
    import functools, gc, json, os, sys, tempfile
    from collections import Counter
    from unittest import mock

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from torch._inductor.graph import GraphLowering
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    from kvcompile.ops.act_quant import cpu
    from kvcompile.presets import compilation_config

    PROMPTS = json.loads(sys.argv[2])

    def generate(llm, prompts, tokens, **further):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **further)
        return llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)

    def kernels(llm, tokens):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as events:
            generate(llm, PROMPTS[:1], tokens)
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            events.export_chrome_trace(file.name)
            trace = json.load(open(file.name))["traceEvents"]
        return Counter(event["name"] for event in trace if event.get("cat") == "kernel")

    def decode_kernels(llm, steps):
        generate(llm, PROMPTS[:1], steps + 1)
        many, one = kernels(llm, steps + 1), kernels(llm, 1)
        return {name: (many[name] - one[name]) / steps for name in many | one if many[name] != one[name]}

    sites = []
    def keep_inputs(function):
        @functools.wraps(function)
        def kept(*inputs):
            copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
            sites.append((function.__name__, copies))
            return function(*inputs)
        return kept

    for engine in json.loads(sys.argv[1]):
        codes = []
        arguments = {
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 4,
            "enable_prefix_caching": False,
            **engine["arguments"],
        }
        if engine["compilation"] is not None:
            arguments["compilation_config"] = compilation_config(**engine["compilation"])
        with mock.patch.object(GraphLowering, "save_output_code", codes.append):
            llm = LLM(engine["model"], **arguments)
        sites.clear()
        with mock.patch.multiple(cpu, **{
            name: keep_inputs(getattr(cpu, name))
            for name in ("rms_norm_quant", "fused_add_rms_norm_quant", "silu_mul_quant")
        }):
            generate(llm, PROMPTS, 1)
        torch.save(sites, sys.argv[3])
        answers = []
        for output in generate(llm, PROMPTS, 6, prompt_logprobs=0, logprobs=0):
            chosen = output.outputs[0]
            follow = [*output.prompt_token_ids, *chosen.token_ids]
            scored = [*output.prompt_logprobs[1:], *chosen.logprobs]
            answers.append([follow, [given[t].logprob for given, t in zip(scored, follow[1:], strict=True)]])
        config = llm.llm_engine.vllm_config.compilation_config
        said = {
            "codes": codes,
            "answers": answers,
            "mode": config.mode.name,
            "cuda_graphs": config.cudagraph_mode.name,
            "decode_kernels": decode_kernels(llm, engine["decode_steps"]) if engine["decode_steps"] else {},
        }
        print("ENGINE", json.dumps(said), flush=True)
        del llm, config
        gc.collect()
        cleanup_dist_env_and_memory()
        _ROPE_DICT.clear()  # vLLM gives the next engine these modules, with the kernels that this one chose
"""
PROMPTS = [[(7 * i * i + 31 * j) % 509 for i in range(1, n + 1)] for j, n in enumerate((3, 40, 130))]
_CALL = re.compile(r"^\s*(?:\w+ = )?torch\.ops\.(kvcompile|vllm)\.(\w+)\.default\(", re.MULTILINE)


@dataclass(frozen=True)
class Engine:
    """What to run. `compilation` None: without kvcompile. `decode_steps`: over how many to count kernels, on a GPU."""

    model: Path
    arguments: Mapping[str, Any]
    compilation: Mapping[str, Any] | None
    decode_steps: int = 0


@dataclass(frozen=True)
class Compiled:
    """`codes`: generated for each graph, in order. `answers`: tokens of prompt and continuation, and of each token but
    the first its log-probability. `decode_kernels`: launches by kernel of one decode step."""

    codes: list[str]
    answers: list[tuple[list[int], list[float]]]
    mode: str
    cuda_graphs: str
    decode_kernels: dict[str, float]

    def calls(self) -> list[Counter[str]]:
        """Calls of kvcompile's and vLLM's operators, of each graph that has any (the sampler's have none)."""
        return [found for code in self.codes if (found := operator_calls(code))]

    def logprobs(self) -> torch.Tensor:
        return torch.tensor([value for _, values in self.answers for value in values], dtype=torch.float64)


def operator_calls(code: str) -> Counter[str]:
    """`namespace::name` of the operators of kvcompile and vLLM that generated code calls, and how often."""
    return Counter("::".join(found) for found in _CALL.findall(code))


def run_compiled(
    engines: Mapping[str, Engine], folder: Path, *, prompts: list[list[int]] = PROMPTS, timeout_s: float = 900
) -> tuple[dict[str, Compiled], list[tuple[str, list[Any]]], str]:
    """Run `engines` with cold compile caches in `folder` on `prompts`, each a list of tokens.

    Also gives, of the last one's first step on a CPU, each fused operator's name and inputs, and all that was logged.
    """
    caches = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    wanted = json.dumps([{**vars(engine), "model": str(engine.model)} for engine in engines.values()])
    sites = folder / "sites.pt"
    log = run_python(SCRIPT, wanted, json.dumps(prompts), sites, environment=caches, timeout_s=timeout_s)
    lines = [json.loads(line.removeprefix("ENGINE ")) for line in log.splitlines() if line.startswith("ENGINE ")]
    compiled = {name: Compiled(**line) for name, line in zip(engines, lines, strict=True)}
    return compiled, torch.load(sites), log


def apart(one: Compiled, other: Compiled) -> float:
    """Mean distance of the log-probabilities of the prompts' tokens, which both were given."""
    parts = []
    for (tokens, a), (_, b) in zip(one.answers, other.answers, strict=True):
        given = len(tokens) - 6 - 1
        parts.append((torch.tensor(a[:given]) - torch.tensor(b[:given])).abs())
    return torch.cat(parts).mean().item()
