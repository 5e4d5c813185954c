"""`vllm serve MODEL --compilation-config kvcompile` answers like stock vLLM in bf16, from half the memory.

Requests ask for all of their prompts to be kept, so that what is compared is the int8 cache; one test does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcompile.tools.prose import prose
from kvcompile.tools.server import VllmServer, group_alive
from tests.engine import SERVER_ARGUMENTS

CONTINUATION = 32
WHOLE = {"vllm_xargs": {"kv_prune": "false"}}  # nothing to stock vLLM
READY_TIMEOUT_S = 500
# Single log-probabilities move by a few hundredths of a nat between the two caches, and between batch compositions.
NEAR_TIE_NATS = 0.15

# A short fact, code, a list, dialogue, numbers, and prose of 208, 1,089 and 3,669 tokens.
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Three things to pack for a week by the sea: 1.",
    '"Where have you been?" she asked. He looked at the floor and said,',
    "1, 1, 2, 3, 5, 8, 13,",
    prose()[:1_000],
    prose()[2_000:7_000],
    prose()[:17_000],
)


@dataclass
class Answers:
    """What one server said: greedy continuation per prompt, and its log-probability of the stock continuations."""

    tokens: list[list[int]]
    prompts: list[list[int]]
    cache: dict[str, str]
    decoded: list[list[float]]  # log-probability of each continuation token as decoding gave it
    first: list[dict[int, float]]  # the likeliest first tokens of each prompt with their log-probabilities
    log: str = ""
    logprobs: list[list[float]] = field(default_factory=list)


def _tokenize(server: VllmServer, text: str) -> list[int]:
    return server.post("/tokenize", {"model": server.command[2], "prompt": text})["tokens"]


def _continue(server: VllmServer, prompt: list[int]) -> tuple[list[int], list[float], dict[int, float]]:
    """Greedy continuation, the log-probability of each of its tokens, and those of the likeliest first tokens."""
    body = {
        "model": server.command[2],
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": CONTINUATION,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
        **WHOLE,
    }
    choice = server.post("/v1/completions", body)["choices"][0]
    first = {int(name.removeprefix("token_id:")): p for name, p in choice["logprobs"]["top_logprobs"][0].items()}
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], first


def _score(server: VllmServer, prompt: list[int], continuation: list[int]) -> list[float]:
    """Log-probability of each token of `continuation` behind `prompt`."""
    tokens = prompt + continuation
    body = {"model": server.command[2], "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    entries = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    first = len(prompt)
    return [entries[i][str(tokens[i])]["logprob"] for i in range(first, len(tokens))]


def _ask(server: VllmServer, log: Path, stock: Answers | None) -> Answers:
    server.wait_until_ready(READY_TIMEOUT_S)
    prompts = [_tokenize(server, p) for p in PROMPTS]
    tokens, decoded, first = zip(*(_continue(server, p) for p in prompts), strict=True)
    answers = Answers(list(tokens), prompts, server.cache_info(), list(decoded), list(first))
    continuations = (stock or answers).tokens
    answers.logprobs = [_score(server, p, c) for p, c in zip(prompts, continuations, strict=True)]
    answers.log = log.read_text()
    return answers


def _assert_same_first_tokens(tokens: list[list[int]], others: Answers) -> None:
    """Equal to the others' on all prompts, or on all but one, to whose two tokens they give all but the same weight."""
    apart = []
    for mine, theirs, likeliest in zip(tokens, others.tokens, others.first, strict=True):
        if mine[0] != theirs[0]:
            apart.append((mine[0], theirs[0]))
            assert likeliest[theirs[0]] - likeliest.get(mine[0], float("-inf")) < NEAR_TIE_NATS, (apart, likeliest)
    assert len(apart) <= 1, apart


@pytest.fixture(scope="module")
def stock(
    smollm2_checkpoint: Path, compile_caches: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    log = tmp_path_factory.mktemp("stock") / "log"
    # Eager: the same kernels in bf16 without a minute of compilation that nobody looks at.
    arguments = (*SERVER_ARGUMENTS, "--enforce-eager")
    with VllmServer(smollm2_checkpoint, arguments, log=log, environment=compile_caches) as server:
        return _ask(server, log, None)


@pytest.fixture(scope="module")
def served(
    smollm2_checkpoint: Path, compile_caches: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("kvcompile") / "log"
    arguments = (*SERVER_ARGUMENTS, "--compilation-config", "kvcompile", "--enable-prompt-tokens-details")
    server = VllmServer(smollm2_checkpoint, arguments, log=log, environment=compile_caches)
    with server:
        group = server._running().pid
        server.wait_until_ready(READY_TIMEOUT_S)
        yield server
    assert not group_alive(group), "processes of the server are left"


@pytest.fixture(scope="module")
def ours(served: VllmServer, stock: Answers) -> Answers:
    return _ask(served, served.log, stock)


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_prompts_are_real_and_one_is_a_long_document(stock: Answers) -> None:
    lengths = [len(p) for p in stock.prompts]
    assert len(lengths) == 8
    assert max(lengths) >= 3_000


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_first_tokens_agree_with_stock_but_for_a_near_tie(stock: Answers, ours: Answers) -> None:
    assert ours.prompts == stock.prompts
    _assert_same_first_tokens(ours.tokens, stock)


@pytest.mark.e2e
def test_mean_logprob_drift_of_the_stock_continuation_is_under_a_fiftieth_of_a_nat(
    stock: Answers, ours: Answers
) -> None:
    differences = [
        s - o
        for stock_row, our_row in zip(stock.logprobs, ours.logprobs, strict=True)
        for s, o in zip(stock_row, our_row, strict=True)
    ]
    assert len(differences) == 8 * CONTINUATION
    drift = sum(differences) / len(differences)
    size = sum(map(abs, differences)) / len(differences)
    print(f"drift {drift:+.4f}, mean size {size:.4f} nats per token")
    assert abs(drift) < 0.02, f"{drift:.4f} nats per token"
    # Signs must not hide what is wrong: rounding in bf16 alone moves a token by some hundredths of a nat.
    assert size < 0.1, f"{size:.4f} nats per token"


@pytest.mark.e2e
def test_decoding_gives_the_log_probabilities_that_a_prefill_of_the_same_tokens_gives(
    served: VllmServer, ours: Answers
) -> None:
    for prompt, tokens, decoded in zip(ours.prompts, ours.tokens, ours.decoded, strict=True):
        scored = _score(served, prompt, tokens)
        differences = [abs(d - s) for d, s in zip(decoded, scored, strict=True)]
        assert sum(differences) / len(differences) < 0.1, f"prompt of {len(prompt)} tokens: {differences}"


@pytest.mark.e2e
def test_the_same_memory_holds_at_least_1_85_times_the_blocks(stock: Answers, ours: Answers) -> None:
    assert ours.cache["cache_dtype"] == "int8_per_token_head"
    assert ours.cache["block_size"] == stock.cache["block_size"]
    assert ours.cache["kv_cache_memory_bytes"] == stock.cache["kv_cache_memory_bytes"]
    assert int(ours.cache["num_gpu_blocks"]) / int(stock.cache["num_gpu_blocks"]) >= 1.85


@pytest.mark.e2e
def test_one_start_up_line_says_what_is_active_and_stock_says_nothing(stock: Answers, ours: Answers) -> None:
    lines = [line for line in ours.log.splitlines() if "active: kv8" in line]
    assert len(lines) == 1
    assert "active: kv8 (136 instead of 256 bytes per token and KV head, torch CPU operators), passes" in lines[0]
    active, _, off = lines[0].partition("; not active: ")
    assert "prune (robust, of a prompt 50%, at least 544 tokens kept), scheduler (by KV length" in active
    assert "prune" not in off and "offload (offload.enabled=false)" in off
    assert " active: " not in stock.log


@pytest.mark.e2e
def test_a_repeated_document_hits_the_prefix_cache_and_keeps_its_answer(served: VllmServer, ours: Answers) -> None:
    body = {
        "model": served.command[2],
        "prompt": ours.prompts[7],
        "temperature": 0,
        "max_tokens": CONTINUATION,
        "ignore_eos": True,
        "return_token_ids": True,
        **WHOLE,
    }
    replies = [served.post("/v1/completions", body) for _ in range(2)]
    block_size = int(ours.cache["block_size"])
    for reply in replies:
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(ours.prompts[7]) - 1) // block_size * block_size
    first, second = (reply["choices"][0]["token_ids"] for reply in replies)
    assert first == second
    # Only the first tokens: in bf16 the cold answer and the cached ones part at the 19th; why is not known.
    assert first[:8] == ours.tokens[7][:8]


@pytest.mark.e2e
def test_prompts_served_together_all_finish(served: VllmServer, ours: Answers) -> None:
    with ThreadPoolExecutor(8) as pool:
        together = [tokens for tokens, *_ in pool.map(lambda p: _continue(served, p), ours.prompts)]
    assert [len(t) for t in together] == [CONTINUATION] * 8
    _assert_same_first_tokens(together, ours)


@pytest.mark.e2e
def test_prompts_that_say_nothing_are_pruned_to_half_if_they_are_long_and_metrics_say_so(
    served: VllmServer, ours: Answers
) -> None:
    assert served.counted("pruned_tokens") == 0  # every request before this asked for all of its prompt
    block_size, released = int(ours.cache["block_size"]), 0
    for prompt in ours.prompts[5:]:
        body = {"model": served.command[2], "prompt": prompt, "max_tokens": CONTINUATION, "ignore_eos": True}
        assert served.post("/v1/completions", body)["usage"]["completion_tokens"] == CONTINUATION
        released += max(0, len(prompt) - max(544, -(-len(prompt) // 2))) // block_size
        assert served.counted("prune_reclaimed_blocks") == released
    assert released > 15
    assert served.counted("pruned_tokens") == released * block_size
    assert served.counted("prune_scoring_failures") == 0
