"""Pruning in a real engine on a CPU: the tokens of a plain Llama that keeps the same, and its books right all along."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from kvcompile.ops import prune
from tests.engine import run_python
from tests.llama_reference import Answer, Llama
from tests.pruned_engine import FIELDS, Request, serve
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

WINDOW, BUDGET, NEW = 16, 64, 24
PRUNE = {"enabled": True, "budget_tokens": BUDGET, "window_tokens": WINDOW, "method": "andpro"}
OPTIONS = {"prune": PRUNE}
LENGTHS = (40, 64, 79, 80, 112, 149, 201, 256)


def kept_of(tokens: int, budget: int = BUDGET, block_size: int = 16) -> int | None:
    released = (tokens - budget) // block_size
    return tokens - released * block_size if released > 0 else None


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 1000) for _ in range(length)]


def select(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int) -> torch.Tensor:
    method = prune.parse_method("andpro", window=WINDOW)
    cache, row = prune.pages_of(keys, values)
    scores = prune.prune_score(queries, cache, row, len(keys), queries.shape[-1] ** -0.5, method)
    return prune.select(scores, method, kept)


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("prune") / "model")


def requests(new: int = NEW, lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    return [(prompt(length, seed), new, {}, None) for seed, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Answer]:
    llama = Llama(model)
    return [
        llama.generate(tokens, new, kept=kept_of(len(tokens)), window=WINDOW, select=select)
        for tokens, new, *_ in requests()
    ]


@pytest.fixture(scope="module")
def whole(model: Path) -> list[Answer]:
    llama = Llama(model)
    return [llama.generate(tokens, new) for tokens, new, *_ in requests()]


def assert_agree(answers: list[Answer], found: list[list[int]]) -> None:
    assert all(map(Answer.agrees, answers, found))
    # One answer or two may part at a tie; the others say something to the end.
    assert sum(a.tokens == b for a, b in zip(answers, found, strict=True)) >= len(answers) - 2


RELEASED = sum((n - kept_of(n)) // 16 for n in LENGTHS if kept_of(n))


@pytest.fixture(scope="module")
def served(model: Path) -> list[dict]:
    """Rounds on one engine: all requests, the same once more, each in its own way, some whose clients go away."""
    own = requests()
    ways = [{"kv_prune": False}, {}, {"kv_budget_tokens": 36 + 16}, {"kv_budget_tokens": 200}]
    own = [(tokens, new, ways[i % 4], None) for i, (tokens, new, *_) in enumerate(own)]
    leaving = [(tokens, new, {}, 1 + 3 * i if i % 2 else None) for i, (tokens, new, *_) in enumerate(requests())]
    return serve(model, OPTIONS, [requests(), requests(), own, leaving])


def test_tokens_are_those_of_a_llama_that_keeps_the_same_tokens(
    served: list[dict], wanted: list[Answer], whole: list[Answer]
) -> None:
    run = served[0]
    assert_agree(wanted, run["tokens"])
    # Pruning changes answers here, so that equal ones say something; short prompts are not pruned.
    changed = [a.tokens != b.tokens for a, b in zip(wanted, whole, strict=True)]
    assert sum(changed) >= 3 and not any(changed[: LENGTHS.index(79)])
    assert run["released_blocks"] == RELEASED
    assert run["pruned_tokens"] == 16 * RELEASED


def test_prompts_that_come_again_hit_what_was_not_rewritten_and_give_the_same(
    served: list[dict], wanted: list[Answer]
) -> None:
    again = served[1]
    assert again["tokens"] == served[0]["tokens"]
    # All of a pruned prompt's released pages; of the others what stock would find: whole blocks before the last token.
    assert again["hits"] == [(n - kept_of(n) if kept_of(n) else (n - 1) // 16 * 16) for n in LENGTHS]


def test_a_request_is_pruned_as_it_asks(served: list[dict], model: Path, whole: list[Answer]) -> None:
    llama = Llama(model)
    answers = []
    for i, (tokens, *_) in enumerate(requests()):
        kept = kept_of(len(tokens), (10**6, BUDGET, 52, 200)[i % 4])
        answers.append(
            whole[i] if kept is None else llama.generate(tokens, NEW, kept=kept, window=WINDOW, select=select)
        )
    assert_agree(answers, served[2]["tokens"])


def test_clients_that_go_away_leave_the_others_as_they_were(served: list[dict]) -> None:
    for i, (found, tokens) in enumerate(zip(served[3]["tokens"], served[0]["tokens"], strict=True)):
        assert found == (tokens if i % 2 == 0 else tokens[: len(found)])
    assert any(len(found) < NEW for found in served[3]["tokens"])


def test_every_block_is_free_at_the_end(served: list[dict]) -> None:
    assert [run["left_blocks"] for run in served] == [0] * 4
    assert [run["preemptions"] for run in served] == [0] * 4


def test_chunks_of_a_prompt_give_what_it_gives_in_one_piece(model: Path, wanted: list[Answer]) -> None:
    # Windows that two chunks share, and chunks that end within one.
    (run,) = serve(model, OPTIONS, [requests()], max_num_batched_tokens=56, max_num_seqs=4)
    assert_agree(wanted, run["tokens"])
    assert run["released_blocks"] == RELEASED and run["left_blocks"] == 0


def test_in_a_pool_where_vllm_preempts_pruned_requests_are_served_without(model: Path, wanted: list[Answer]) -> None:
    pool = {"num_gpu_blocks_override": 40, "max_num_seqs": 8}
    long = requests(lengths=(256, 201, 256, 149, 201, 256))
    # In vLLM's own order both, so that pruning alone makes the difference.
    order = {"scheduler": {"enabled": False}}
    (theirs,) = serve(model, order, [long], **pool)
    (ours,) = serve(model, {"prune": {**PRUNE, "inline": "never"}, **order}, [long], **pool)
    assert theirs["preemptions"] > 0 and theirs["released_blocks"] == 0
    assert ours["preemptions"] == 0 and ours["left_blocks"] == 0
    assert ours["released_blocks"] == sum((len(r[0]) - kept_of(len(r[0]))) // 16 for r in long)
    llama = Llama(model)
    kept = {"window": WINDOW, "select": select}
    answers = [llama.generate(tokens, new, kept=kept_of(len(tokens)), **kept) for tokens, new, *_ in long]
    assert_agree(answers, ours["tokens"])


def test_pages_of_128_tokens_preemption_and_a_reset_of_everything_that_runs(model: Path) -> None:
    long = [(prompt(400, seed), 60, {}, None) for seed in range(5)]
    pool = {"block_size": 128, "num_gpu_blocks_override": 10, "max_num_seqs": 4}
    options = {"prune": {**PRUNE, "budget_tokens": 4 + WINDOW + 128}, "scheduler": {"enabled": False}}
    runs = serve(model, options, [long, long], resets=(2, 9), **pool)
    for run in runs:
        assert [len(tokens) for tokens in run["tokens"]] == [60] * 5
        assert run["left_blocks"] == 0
        # 400 tokens less 4 + 16 + 128: a page of each request, and again of those that had to begin anew.
        assert run["released_blocks"] > 5


def test_a_worker_in_a_process_of_its_own_gives_the_same_and_metrics_come_out_of_it(
    model: Path, served: list[dict]
) -> None:
    script = """
        import json, sys
        from vllm import LLM, SamplingParams, TokensPrompt
        from kvcompile.presets import compilation_config

        if __name__ == "__main__":
            model, options, fields, prompts, new = json.loads(sys.argv[1])
            fields = {**fields, "skip_tokenizer_init": True, "additional_config": {"kvcompile": options}}
            llm = LLM(model, compilation_config=compilation_config(mode=0), disable_log_stats=False, **fields)
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            found = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
            print("TOKENS", json.dumps([list(each.outputs[0].token_ids) for each in found]), flush=True)
            metrics = {}
            for each in llm.get_metrics():
                if each.name.startswith("vllm:kvcompile_"):
                    name = " ".join([each.name, *(each.labels[own] for own in ("way", "reason") if own in each.labels)])
                    metrics[name] = each.value if hasattr(each, "value") else [each.count, each.sum]
            print("METRICS", json.dumps(metrics), flush=True)
            # Not left to the end of the interpreter, which a thread of vLLM's may not survive.
            llm.llm_engine.engine_core.shutdown()
    """
    given = [str(model), OPTIONS, FIELDS, [tokens for tokens, *_ in requests()], NEW]
    said = run_python(script, json.dumps(given), timeout_s=600)
    (line,) = [line for line in said.splitlines() if line.startswith("TOKENS ")]
    assert json.loads(line.removeprefix("TOKENS ")) == served[0]["tokens"]
    (line,) = [line for line in said.splitlines() if line.startswith("METRICS ")]
    metrics = json.loads(line.removeprefix("METRICS "))
    assert metrics["vllm:kvcompile_pruned_tokens two_phase"] == 16 * RELEASED
    assert metrics["vllm:kvcompile_prune_reclaimed_blocks two_phase"] == RELEASED
    held = sum(kept_of(length) or length for length in LENGTHS) + len(LENGTHS) * (NEW - 1)
    assert metrics["vllm:kvcompile_request_resident_kv_tokens"] == [len(LENGTHS), held]
    assert metrics["vllm:kvcompile_prune_refusals not_acknowledged"] == 0


def test_what_a_request_asks_wrongly_is_refused_and_the_server_goes_on(model: Path) -> None:
    script = """
        import json, os, sys
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams, TokensPrompt
        from kvcompile.presets import compilation_config

        model, options, fields = json.loads(sys.argv[1])
        fields = {**fields, "skip_tokenizer_init": True, "additional_config": {"kvcompile": options}}
        llm = LLM(model, compilation_config=compilation_config(mode=0), **fields)
        prompt = TokensPrompt(prompt_token_ids=list(range(3, 203)))
        for given in ({"kv_budget_tokens": 10}, {"kv_prune": "maybe"}):
            try:
                llm.generate([prompt], SamplingParams(max_tokens=2, detokenize=False, extra_args=given), use_tqdm=False)
            except ValueError as error:
                print("REFUSED", error)
        # One that asks for the log-probabilities of its prompt stays whole.
        scored = SamplingParams(max_tokens=2, detokenize=False, prompt_logprobs=0, temperature=0)
        several = SamplingParams(max_tokens=4, detokenize=False, n=3, seed=1)
        found = llm.generate([prompt, prompt], [scored, several], use_tqdm=False)
        print("SCORED", len(found[0].prompt_logprobs), "OUTPUTS", len(found[1].outputs))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        print("RELEASED", scheduler.released_blocks)
    """
    said = run_python(script, json.dumps([str(model), OPTIONS, FIELDS]), timeout_s=600)
    refused = [line for line in said.splitlines() if line.startswith("REFUSED ")]
    assert [line.split()[1] for line in refused] == ["kv_budget_tokens", "kv_prune"]
    assert "SCORED 200 OUTPUTS 3" in said
    # Three answers to one prompt, each a request of its own: the first finds nothing in the cache.
    assert f"RELEASED {3 * ((200 - BUDGET) // 16)}" in said
