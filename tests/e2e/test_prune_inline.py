"""Prompts stored inline in a real engine on a CPU: the tokens of a plain Llama that keeps the same, in fewer pages."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch

from kvcompile.ops import prune
from tests.e2e.test_prune_served import LENGTHS, NEW, PRUNE, RELEASED, WINDOW, assert_agree, kept_of, requests, select
from tests.llama_reference import Answer, Llama
from tests.pruned_engine import serve
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

INLINE = {"prune": {**PRUNE, "inline": "always"}}
PRUNED = [length for length in LENGTHS if kept_of(length)]


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("inline") / "model")


def answers(model: Path, chosen: object = select) -> list[Answer]:
    """What a Llama answers that keeps what `chosen` names."""
    llama = Llama(model)
    return [
        llama.generate(tokens, new, kept=kept_of(len(tokens)), window=WINDOW, select=chosen)
        for tokens, new, *_ in requests()
    ]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Answer]:
    return answers(model)


@pytest.fixture(scope="module")
def served(model: Path) -> list[dict]:
    """All in one step; each in its own way; some whose clients go away; and all where nothing can be scored."""
    ways = [{"kv_prune": False}, {}, {"kv_budget_tokens": 36 + 16}, {"kv_budget_tokens": 200}]
    own = [(tokens, new, ways[i % 4], None) for i, (tokens, new, *_) in enumerate(requests())]
    leaving = [(tokens, new, {}, 1 + 3 * i if i % 2 else None) for i, (tokens, new, *_) in enumerate(requests())]
    rounds = [requests(), own, leaving, requests()]
    return serve(model, INLINE, rounds, failing=(3,), max_num_batched_tokens=2048)


def test_tokens_are_those_of_a_llama_that_keeps_the_same_tokens(served: list[dict], wanted: list[Answer]) -> None:
    assert_agree(wanted, served[0]["tokens"])
    assert served[0]["inline_prompts"] == len(PRUNED) and served[0]["released_blocks"] == 0
    assert served[0]["pruned_tokens"] == 16 * RELEASED


def test_no_request_ever_holds_a_page_more_than_for_what_it_keeps(served: list[dict]) -> None:
    held = sum(-(-((kept_of(length) or length) + NEW - 1) // 16) for length in LENGTHS)
    assert served[0]["peak_blocks"] <= held
    assert [run["left_blocks"] for run in served] == [0] * 4
    assert [run["preemptions"] for run in served] == [0] * 4


def test_inline_and_whole_prompts_go_together_in_one_step(served: list[dict], model: Path) -> None:
    llama, expected = Llama(model), []
    for i, (tokens, *_) in enumerate(requests()):
        kept = kept_of(len(tokens), (10**6, 64, 52, 200)[i % 4])
        expected.append(llama.generate(tokens, NEW, kept=kept, window=WINDOW, select=select))
    assert_agree(expected, served[1]["tokens"])


def test_requests_whose_clients_go_away_leave_nothing_and_change_nothing(served: list[dict]) -> None:
    for index, (before, after) in enumerate(zip(served[0]["tokens"], served[2]["tokens"], strict=True)):
        assert after == before[: len(after)]
        assert len(after) == NEW or index % 2


def test_where_nothing_can_be_scored_the_last_tokens_are_kept_and_it_is_counted(
    served: list[dict], model: Path
) -> None:
    def last(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int) -> torch.Tensor:
        return torch.arange(len(keys) - kept, len(keys)).repeat(keys.shape[1], 1)

    assert_agree(answers(model, last), served[3]["tokens"])
    assert [run["scoring_failures"] for run in served] == [0, 0, 0, len(PRUNED)]


@pytest.mark.long
def test_inline_prompts_two_phase_ones_and_whole_ones_share_a_batch(model: Path, wanted: list[Answer]) -> None:
    # Steps of 210 tokens: 256 can only be computed in chunks, others wait for a step of their own, not for long. In the
    # second round all that runs is preempted twice, and begins anew with more tokens than the reference prunes.
    rounds = [requests(), requests()]
    options = {**INLINE, "scheduler": {"enabled": False}}
    (run, _) = serve(model, options, rounds, max_num_batched_tokens=210)
    assert_agree(wanted, run["tokens"])
    assert 0 < run["inline_prompts"] < len(PRUNED) and run["released_blocks"] > 0
    (reset,) = serve(model, INLINE, rounds[:1], resets=(2, 9), max_num_batched_tokens=300)
    assert [len(tokens) for tokens in reset["tokens"]] == [NEW] * len(LENGTHS)
    assert reset["inline_prompts"] > 0 and run["left_blocks"] == reset["left_blocks"] == 0


@pytest.mark.long
def test_a_prompt_that_nothing_can_score_in_two_phases_stays_whole(model: Path) -> None:
    llama = Llama(model)
    options = {"prune": {**PRUNE, "inline": "never"}}
    (run,) = serve(model, options, [requests()], failing=(0,))
    assert_agree([llama.generate(tokens, new) for tokens, new, *_ in requests()], run["tokens"])
    assert (run["scoring_failures"], run["released_blocks"]) == (len(PRUNED), 0)


@pytest.mark.long
def test_critical_weighs_values_by_the_projections_that_the_model_has(model: Path) -> None:
    method, llama = prune.parse_method("critical", window=WINDOW), Llama(model)
    # The reference selects layer by layer, prompt by prompt.
    projections = cycle(llama.weights[f"model.layers.{i}.self_attn.o_proj.weight"] for i in range(llama.layers))

    def critical(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int) -> torch.Tensor:
        cache, row = prune.pages_of(keys, values)
        scale, weight = queries.shape[-1] ** -0.5, next(projections)
        scores = prune.prune_score(queries, cache, row, len(keys), scale, method, output_weight=weight)
        return prune.select(scores, method, kept)

    expected = [
        llama.generate(tokens, new, kept=kept_of(len(tokens)), window=WINDOW, select=critical)
        for tokens, new, *_ in requests()
    ]
    options = {"prune": {**PRUNE, "method": "critical", "inline": "always"}}
    (run,) = serve(model, options, [requests()], max_num_batched_tokens=210)
    assert_agree(expected, run["tokens"])
    assert run["inline_prompts"] > 0 and run["released_blocks"] > 0 and run["scoring_failures"] == 0
