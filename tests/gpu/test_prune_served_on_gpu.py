"""Pruning in a real engine on a GPU: both of vLLM's runners, CUDA graphs and asynchronous scheduling on, books checked
after every step."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine import run_python
from tests.llama_reference import Llama, andpro
from tests.served_trace import random_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

WINDOW, BUDGET, BLOCK, STEP_TOKENS, NEW = 16, 128, 16, 512, 32
PRUNE = {"enabled": True, "budget_tokens": BUDGET, "window_tokens": WINDOW, "method": "andpro", "inline": "never"}
ORDER = {"scheduler": {"enabled": False}}
# kvcompile's options, the runner's version, fields of LLM.
SYSTEMS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "v2": ({"prune": PRUNE}, 2, {}),
    "v1": ({"prune": PRUNE, **ORDER}, 1, {}),
    "eager": ({"prune": PRUNE, **ORDER}, 1, {"enforce_eager": True}),
    "inline": ({"prune": {**PRUNE, "inline": "always"}}, 2, {}),
}
# Whole; a page released; many of them, in one step and in several.
LENGTHS = (100, 144, 400, 1000, 1500)
# So many rows decode while a prompt comes in chunks: of the step's other tokens, twice, and one token.
DECODES = 10
STRADDLING = 2 * (STEP_TOKENS - DECODES) + 1

# Arguments, as JSON: the model, kvcompile's options, fields of LLM, and rounds of [whether the prefix cache is emptied
# first, requests: prompt tokens, new tokens, extra_args, step after which it comes]. Prints what became of each round.
SCRIPT = """
    import json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt
    from kvcompile.integrations.vllm.integrity import check_integrity

    model, options, fields, rounds = json.loads(sys.argv[1])
    extra = {"compilation_config": "kvcompile", "additional_config": {"kvcompile": options}}
    llm = LLM(model, skip_tokenizer_init=True, disable_log_stats=False, **fields, **extra)
    engine = llm.llm_engine
    config, core = engine.vllm_config, engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    pool = scheduler.kv_cache_manager.block_pool

    steps = []  # CUDA graph, tokens, rows, whether a prompt was observed
    if hasattr(runner, "input_batch"):
        choose = runner._determine_batch_execution_and_padding
        def chosen(**given):
            found = choose(**given)
            steps.append([found[0].name, given["num_tokens"], given["num_reqs"], bool(runner._jobs.of_step())])
            return found
        runner._determine_batch_execution_and_padding = chosen
    else:
        choose = runner.cudagraph_manager.dispatch
        def chosen(rows, tokens, uniform):
            found = choose(rows, tokens, uniform)
            steps.append([found.cg_mode.name, tokens, rows, bool(runner._jobs.of_step())])
            return found
        runner.cudagraph_manager.dispatch = chosen

    found = {
        "runner": type(runner).__name__,
        "version": 1 if hasattr(runner, "input_batch") else 2,
        "scheduler": type(scheduler).__name__,
        "asynchronous": config.scheduler_config.async_scheduling,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "rounds": [],
    }
    for number, (empty, requests) in enumerate(rounds):
        if empty:
            assert engine.reset_prefix_cache()
        del steps[:]
        done, hits, ids, calls, released = {}, {}, {}, 0, scheduler.released_blocks
        while len(ids) < len(requests) or engine.has_unfinished_requests():
            for index, (prompt, new, given, after) in enumerate(requests):
                if index not in ids and calls >= after:
                    sampling = SamplingParams(
                        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0,
                        extra_args=given or None,
                    )
                    tokens = TokensPrompt(prompt_token_ids=prompt)
                    ids[index] = engine.add_request(f"{number}-{index}", tokens, sampling)
            for output in engine.step():
                index, answer = int(output.request_id.split("-")[1]), output.outputs[0]
                scores = [scored[token].logprob for scored, token in zip(answer.logprobs, answer.token_ids)]
                done[index], hits[index] = [list(answer.token_ids), scores], output.num_cached_tokens
            calls += 1
            check_integrity(scheduler, runner)
        found["rounds"].append({
            "answers": [done[index] for index in range(len(requests))],
            "hits": [hits[index] for index in range(len(requests))],
            "released_blocks": scheduler.released_blocks - released,
            "left_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "steps": list(steps),
        })
    print("FOUND", json.dumps(found), flush=True)
    engine.engine_core.shutdown()
"""


def released_of(tokens: int) -> int:
    return max(0, (tokens - BUDGET) // BLOCK)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 1000) for _ in range(length)]


def requests(**given: Any) -> list[tuple[list[int], int, dict[str, Any], int]]:
    return [(prompt(length, seed), NEW, given, 0) for seed, length in enumerate(LENGTHS)]


LATE = [(prompt(20, 100 + i), 40, {}, 0) for i in range(DECODES)] + [(prompt(STRADDLING, 99), NEW, {}, 4)]
FIRST, AGAIN, STRADDLED, WHOLE, AMPLE = range(5)
ROUNDS = [
    (True, requests()),
    (False, requests()),
    (True, LATE),
    (True, requests(kv_prune=False)),
    (True, requests(kv_budget_tokens=4096)),
]


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prune")
    config = json.loads((tiny_llama / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return random_llama(folder / "config.json", folder / "model")


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, dict[str, Any]]:
    def serve(system: str) -> dict[str, Any]:
        options, version, fields = SYSTEMS[system]
        common = {
            "dtype": "float16",
            "max_model_len": 2048,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": 16,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 64 << 20,
            "gpu_memory_utilization": 0.2,
        }
        given = json.dumps([str(model), options, {**common, **fields}, ROUNDS])
        environment = {"VLLM_USE_V2_MODEL_RUNNER": str(version - 1), "VLLM_CACHE_ROOT": str(model.parent / "vllm")}
        (line,) = [
            line
            for line in run_python(SCRIPT, given, environment=environment).splitlines()
            if line.startswith("FOUND ")
        ]
        return json.loads(line.removeprefix("FOUND "))

    with ThreadPoolExecutor() as pool:  # most of the time goes into compiling
        return dict(zip(SYSTEMS, pool.map(serve, SYSTEMS), strict=True))


def _error(ours: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _apart(ours: list[Any], theirs: list[Any]) -> tuple[float, int]:
    """Mean difference of log-probabilities up to the first token that differs, and how many tokens that are."""
    differences = []
    for (tokens, scores), (other_tokens, other_scores) in zip(ours, theirs, strict=True):
        for token, score, other, other_score in zip(tokens, scores, other_tokens, other_scores, strict=True):
            differences.append(abs(score - other_score))
            if token != other:
                break
    return sum(differences) / len(differences), len(differences)


def test_the_engines_are_of_both_runners_with_graphs_and_asynchronous_scheduling(
    found: dict[str, dict[str, Any]],
) -> None:
    for system, (_, version, fields) in SYSTEMS.items():
        ours = found[system]
        assert (ours["runner"], ours["version"]) == ("PruningGPUModelRunner", version)
        assert ours["asynchronous"] is True
        assert ours["graphs"] == ("NONE" if "enforce_eager" in fields else "FULL_AND_PIECEWISE")
        ordered = "PruningLengthAwareAsyncScheduler" if system in ("v2", "inline") else "PruningAsyncScheduler"
        assert ours["scheduler"] == ordered


@pytest.mark.parametrize("system", SYSTEMS)
def test_answers_are_those_of_a_llama_that_keeps_the_same_tokens(
    found: dict[str, dict[str, Any]], model: Path, system: str
) -> None:
    llama, near, far = Llama(model), [], []
    rounds = found[system]["rounds"]
    served = [*zip(requests(), rounds[FIRST]["answers"], strict=True), (LATE[-1], rounds[STRADDLED]["answers"][-1])]
    for (tokens, *_), (answer, scores) in served:
        whole = llama.score(tokens, answer)
        if pages := released_of(len(tokens)):
            kept = len(tokens) - BLOCK * pages
            near.append(_error(scores, llama.score(tokens, answer, kept=kept, window=WINDOW, select=andpro(WINDOW))))
            far.append(_error(scores, whole))
        else:
            assert _error(scores, whole) < 0.05
    print(f"\n{system}: log-probabilities from the Llama that keeps the same {near}, from one that keeps all {far}")
    # In fp16 a few tokens of nearly the same score change places: one H200 measured 0.03 to 0.16 where all is pruned
    # against 0.35 to 1.9, all four engines within 0.01 of each other.
    assert max(near) < 0.25 and all(5 * ours < others for ours, others in zip(near, far, strict=True))


@pytest.mark.parametrize("system", ["v2", "v1", "inline"])
def test_graphs_change_no_answer_much(found: dict[str, dict[str, Any]], system: str) -> None:
    for round_ in (FIRST, STRADDLED):
        ours, eager = (found[name]["rounds"][round_]["answers"] for name in (system, "eager"))
        difference, common = _apart(ours, eager)
        print(f"\n{system}: {difference:.5f} apart from eager mode over {common} tokens")
        assert difference <= 0.05 and common > sum(len(tokens) for tokens, _ in eager) / 2


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_prompt_of_which_all_is_kept_is_answered_as_one_that_is_not_pruned(
    found: dict[str, dict[str, Any]], system: str
) -> None:
    whole, ample, pruned = (found[system]["rounds"][round_] for round_ in (WHOLE, AMPLE, FIRST))
    assert whole["released_blocks"] == ample["released_blocks"] == 0
    assert [tokens for tokens, _ in whole["answers"]] == [tokens for tokens, _ in ample["answers"]]
    # Pruning changes answers here, so that equal ones say something.
    assert [tokens for tokens, _ in whole["answers"]] != [tokens for tokens, _ in pruned["answers"]]


@pytest.mark.parametrize("system", ["v2", "v1", "eager"])
def test_pages_are_released_hit_again_and_free_at_the_end(found: dict[str, dict[str, Any]], system: str) -> None:
    rounds = found[system]["rounds"]
    released = sum(map(released_of, LENGTHS))
    assert [rounds[FIRST]["released_blocks"], rounds[AGAIN]["released_blocks"]] == [released] * 2
    assert rounds[STRADDLED]["released_blocks"] == released_of(STRADDLING)
    wanted = [BLOCK * released_of(length) or (length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert (rounds[FIRST]["hits"], rounds[AGAIN]["hits"]) == ([0] * len(LENGTHS), wanted)
    difference, common = _apart(rounds[AGAIN]["answers"], rounds[FIRST]["answers"])
    assert difference <= 0.05 and common > NEW * len(LENGTHS) / 2
    assert [each["left_blocks"] for each in rounds] == [0] * len(rounds)


def test_prompts_that_are_stored_inline_leave_nothing_behind(found: dict[str, dict[str, Any]]) -> None:
    rounds = found["inline"]["rounds"]
    # What is longer than a step is pruned when it is all there.
    assert rounds[FIRST]["released_blocks"] == sum(released_of(n) for n in LENGTHS if n > STEP_TOKENS)
    assert [each["left_blocks"] for each in rounds] == [0] * len(rounds)


@pytest.mark.parametrize("system", ["v2", "v1"])
def test_a_last_chunk_of_one_token_runs_no_graph_of_the_whole_model_and_plain_decodes_do(
    found: dict[str, dict[str, Any]], system: str
) -> None:
    rounds = found[system]["rounds"]
    straddled = rounds[STRADDLED]["steps"]
    assert [step for step in straddled if step[1] == step[2] and step[3]] == [
        ["PIECEWISE", DECODES + 1, DECODES + 1, True]
    ]
    for round_ in rounds:
        observed = [graph for graph, _, _, job in round_["steps"] if job]
        decodes = [graph for graph, tokens, rows, job in round_["steps"] if tokens == rows and not job]
        assert "FULL" not in observed
        assert len(decodes) > NEW / 2 and set(decodes) == {"FULL"}
