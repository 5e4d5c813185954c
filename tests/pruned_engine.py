"""A real engine that prunes, in a process of its own, with its books checked after every step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.engine import run_python

# Argument: a file with, as JSON, the model, kvcompile's options (None: stock), fields of LLM, and rounds of requests:
# [prompt tokens, new tokens, extra_args, step after which the client goes away or None]; steps after which, in every
# round, the prefix cache is reset with all that runs preempted; and rounds in which no prompt can be scored. Prints
# what came of each round.
SCRIPT = """
    import json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt
    from kvcompile.integrations.vllm.integrity import check_integrity
    from kvcompile.ops import prune
    from kvcompile.presets import compilation_config

    model, options, fields, rounds, resets, failing = json.load(open(sys.argv[1]))
    extra = {} if options is None else {"additional_config": {"kvcompile": options}}
    compilation = {} if options is None else compilation_config(mode=0)
    fields = {**fields, "skip_tokenizer_init": True, "disable_log_stats": False}
    llm = LLM(model, compilation_config=compilation, **fields, **extra)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    pool = scheduler.kv_cache_manager.block_pool
    usable = pool.num_gpu_blocks - 1

    # The null block is nobody's: what lies in it never changes.
    null = [cache[0].clone() for cache in runner.kv_caches] if options is not None else []

    def check():
        check_integrity(scheduler, runner)
        assert all(torch.equal(cache[0], before) for cache, before in zip(runner.kv_caches, null))

    score = prune.prune_score
    def fail(*_, **__):
        raise RuntimeError("no memory left")

    preempted = peak = most_running = 0
    step_of = scheduler.schedule
    def schedule():
        global preempted, peak, most_running
        output = step_of()
        preempted += len(output.preempted_req_ids or ())
        peak = max(peak, usable - pool.get_num_free_blocks())
        most_running = max(most_running, len(scheduler.running))
        return output
    scheduler.schedule = schedule

    for number, requests in enumerate(rounds):
        preempted, peak, steps, most_running = 0, 0, 0, 0
        prune.prune_score = fail if number in failing else score
        done, hits, ids = {}, {}, {}
        for index, (prompt, new, given, _) in enumerate(requests):
            sampling = SamplingParams(
                temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args=given or None
            )
            ids[index] = engine.add_request(f"{number}-{index}", TokensPrompt(prompt_token_ids=prompt), sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id.split("-")[1])
                done[index], hits[index] = list(output.outputs[0].token_ids), output.num_cached_tokens
            steps += 1
            check()
            if steps in resets:
                assert llm.reset_prefix_cache(reset_running_requests=True)
            for index, (*_, leaves) in enumerate(requests):
                if leaves == steps:
                    engine.abort_request([f"{number}-{index}"])
                    check()
        said = {
            "tokens": [done.get(index, []) for index in range(len(requests))],
            "hits": [hits.get(index, 0) for index in range(len(requests))],
            "preemptions": preempted,
            "steps": steps,
            "peak_blocks": peak,
            "most_running": most_running,
            "left_blocks": usable - pool.get_num_free_blocks(),
        }
        for name in ("released_blocks", "pruned_tokens", "inline_prompts", "scoring_failures"):
            said[name] = getattr(scheduler, name, 0)
        print("ROUND", json.dumps(said), flush=True)
"""
FIELDS = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 16,
    "dtype": "float32",
    "enforce_eager": True,
}

Request = tuple[list[int], int, dict[str, Any], int | None]


def serve(
    model: Path,
    options: dict[str, Any] | None,
    rounds: list[list[Request]],
    *,
    resets: tuple[int, ...] = (),
    failing: tuple[int, ...] = (),
    **fields: Any,
) -> list[dict[str, Any]]:
    """What became of each round of requests, all served by one engine."""
    given = [str(model), options, {**FIELDS, **fields}, rounds, resets, failing]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "given.json")
        file.write_text(json.dumps(given))  # prompts may be longer than arguments can be
        said = run_python(SCRIPT, file, timeout_s=1200)
    marked = [line.removeprefix("ROUND ") for line in said.splitlines() if line.startswith("ROUND ")]
    assert len(marked) == len(rounds), said[-3000:]
    return [json.loads(line) for line in marked]
