"""An engine of two ranks that prunes, in processes of its own, and what its answers have to be."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.engine import run_python
from tests.llama_reference import Llama, andpro

WINDOW, BUDGET, BLOCK, NEW, STEP_TOKENS = 16, 64, 16, 16, 112
PRUNE = {"enabled": True, "budget_tokens": BUDGET, "window_tokens": WINDOW, "method": "andpro", "inline": "never"}
LENGTHS = (40, 80, 113, 201)  # whole, a page released, and in several steps

# Arguments, as JSON: the model, kvcompile's options, fields of CompilationConfig and of LLM, prompts, new tokens.
SCRIPT = """
    import json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt
    from kvcompile.integrations.vllm.integrity import check_integrity
    from kvcompile.presets import compilation_config

    model, options, compilation, fields, prompts, new = json.loads(sys.argv[1])
    llm = LLM(
        model,
        tensor_parallel_size=2,
        compilation_config=compilation_config(**compilation),
        additional_config={"kvcompile": options},
        skip_tokenizer_init=True,
        **fields,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    step = scheduler.update_from_output

    def update(*args):
        outputs = step(*args)
        check_integrity(scheduler)
        return outputs

    scheduler.update_from_output = update
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
    found = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
    answers = [each.outputs[0] for each in found]
    pool = scheduler.kv_cache_manager.block_pool
    said = {
        "answers": [
            [list(a.token_ids), [scored[token].logprob for scored, token in zip(a.logprobs, a.token_ids)]]
            for a in answers
        ],
        "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "released_blocks": scheduler.released_blocks,
        "left_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
    print("SERVED", json.dumps(said), flush=True)
    # Not left to the end of the interpreter, which a thread of vLLM's does not survive if the engine takes its time.
    llm.llm_engine.engine_core.shutdown()
"""


def serve(
    model: Path, *, compilation: dict[str, Any], fields: dict[str, Any], environment: dict[str, str]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts of LENGTHS, and what became of them."""
    rng = random.Random(0)
    prompts = [[rng.randint(3, 1000) for _ in range(length)] for length in LENGTHS]
    common = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, "max_model_len": 512, "block_size": BLOCK}
    given = json.dumps([str(model), {"prune": PRUNE}, compilation, {**common, **fields}, prompts, NEW])
    log = run_python(SCRIPT, given, environment=environment)
    (line,) = [line for line in log.splitlines() if line.startswith("SERVED ")]
    return prompts, json.loads(line.removeprefix("SERVED "))


def assert_pruned(model: Path, prompts: list[list[int]], served: dict[str, Any], *, apart: float) -> None:
    """As a Llama answers that keeps the same tokens: log-probabilities at most `apart` from its own, on average."""
    released = [max(0, (length - BUDGET) // BLOCK) for length in LENGTHS]
    assert served["released_blocks"] == sum(released) and served["left_blocks"] == 0
    llama, near, far = Llama(model), [], []
    for prompt, pages, (tokens, scores) in zip(prompts, released, served["answers"], strict=True):
        kept = len(prompt) - BLOCK * pages if pages else None
        pruned = llama.score(prompt, tokens, kept=kept, window=WINDOW, select=andpro(WINDOW))
        for errors, wanted in ((near, pruned), (far, llama.score(prompt, tokens))):
            errors.append(sum(abs(a - b) for a, b in zip(scores, wanted, strict=True)) / NEW)
    print(f"\nlog-probabilities from the Llama that keeps the same {near}, from one that keeps all {far}")
    # The first prompt is whole, whichever way.
    assert max(near) <= apart and 3 * sum(near[1:]) < sum(far[1:])
