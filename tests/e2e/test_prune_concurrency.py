"""What pruning is for: one pool of pages, stock vLLM and a pruned server, and how many requests run together in it.

A prompt of T tokens with keep_ratio 0.5 keeps T / 2, and what is decoded adds as much to either: pages fall by half for
the prompt, and by a little less than half with a long answer. So answers are short here, as where long prompts are
asked about, and the pool is one that eight pruned requests fill.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.ops import prune
from tests.llama_reference import Answer, Llama
from tests.pruned_engine import Request, serve
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]

PAGE = 16
SHORT, LONG = 17, 49  # new tokens, of which all but the last are stored: one page more, and three


@dataclass(frozen=True)
class Case:
    """prompt: T; budget: of requests that ask for an absolute one, whose prompts have `long` tokens; window: W."""

    prompt: int
    long: int
    budget: int
    window: int
    vocabulary: int
    fields: dict[str, Any]

    @property
    def pages(self) -> int:
        """Of the pool: for eight prompts of which half is kept, and a page more for each."""
        return 8 * (self.prompt // 2 // PAGE + 1)

    @property
    def options(self) -> dict[str, Any]:
        least = 4 + self.window + PAGE
        pruning = {"enabled": True, "method": "andpro", "window_tokens": self.window, "inline": "always"}
        # In vLLM's own order, so that pruning alone makes the difference.
        return {"prune": {**pruning, "keep_ratio": 0.5, "min_tokens": least}, "scheduler": {"enabled": False}}

    def requests(self, count: int, new: int, seed: int, budget: int | None = None) -> list[Request]:
        rng, length = random.Random(seed), self.long if budget else self.prompt
        extra = {"kv_budget_tokens": budget} if budget else {}
        prompts = [[rng.randrange(3, self.vocabulary) for _ in range(length)] for _ in range(count)]
        return [(tokens, new, extra, None) for tokens in prompts]

    def rounds(self) -> list[list[Request]]:
        """One alone with nothing to decode; eight; six with answers for which stock has no room; with a budget."""
        return [
            self.requests(1, 1, 0),
            self.requests(8, SHORT, 1),
            self.requests(6, LONG, 2),
            self.requests(self.together(self.budget), SHORT, 3, self.budget),
        ]

    def together(self, kept: int) -> int:
        """How many the pool has room for, each with a short answer."""
        return self.pages // (-(-kept // PAGE) + 1)

    def select(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int) -> torch.Tensor:
        method = prune.parse_method("andpro", window=self.window)
        cache, row = prune.pages_of(keys, values)
        scores = prune.prune_score(queries, cache, row, len(keys), queries.shape[-1] ** -0.5, method)
        return prune.select(scores, method, kept)


def compare(name: str, case: Case, model: Path) -> None:
    fields = {"num_gpu_blocks_override": 1 + case.pages, "max_num_batched_tokens": 8 * case.long, **case.fields}
    stock = serve(model, None, case.rounds(), **fields)
    pruned = serve(model, case.options, case.rounds(), **fields)
    for which, (theirs, ours) in zip(
        ("alone, 1 token", "8, short", "6, longer", "budget"), zip(stock, pruned, strict=True), strict=True
    ):
        for system, run in (("vLLM", theirs), ("pruned", ours)):
            print(
                f"{name}, pool of {case.pages} pages, {which}: {system} peak {run['peak_blocks']} pages, "
                f"{run['most_running']} together, {run['preemptions']} preempted, {run['steps']} steps"
            )
    assert all(run["preemptions"] == run["left_blocks"] == 0 for run in pruned)
    assert pruned[-1]["inline_prompts"] == sum(map(len, case.rounds()))
    # Of one prompt, half the pages.
    assert pruned[0]["peak_blocks"] * 2 == stock[0]["peak_blocks"] == case.prompt // PAGE
    # Twice as many run together, from their first token to their last, and stock does not preempt for it.
    assert stock[1]["preemptions"] == 0
    assert pruned[1]["most_running"] == 8 >= 2 * stock[1]["most_running"]
    # Where stock takes in as many as fit, and has to send some back, the pruned server has room for all.
    assert stock[2]["preemptions"] > 0 and pruned[2]["most_running"] == 6
    # And with an absolute budget it is by as much as the budget says.
    assert stock[3]["preemptions"] == 0
    assert pruned[3]["most_running"] == len(case.rounds()[3]) >= 3 * stock[3]["most_running"]
    # None of which would say anything were the tokens others than they have to be.
    llama = Llama(model)
    answers: list[Answer] = []
    for tokens, new, *_ in case.rounds()[1][:3]:
        answers.append(llama.generate(tokens, new, kept=case.prompt // 2, window=case.window, select=case.select))
    assert all(answer.agrees(found) for answer, found in zip(answers, pruned[1]["tokens"], strict=False))
    assert any(answer.tokens == found for answer, found in zip(answers, pruned[1]["tokens"], strict=False))


@pytest.mark.long
def test_in_the_same_pool_twice_as_many_requests_run_together(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("concurrency") / "model")
    fields = {"max_num_seqs": 32, "max_model_len": 512}
    compare("random Llama of 2 layers", Case(320, 448, 64, 16, 1000, fields), model)


@pytest.mark.long
def test_in_the_same_pool_twice_as_many_requests_run_together_with_a_real_model(smollm2_checkpoint: Path) -> None:
    fields = {"max_num_seqs": 32, "max_model_len": 2304, "kv_cache_memory_bytes": 512 << 20}
    compare("SmolLM2-135M", Case(1024, 1536, 544, 32, 49000, fields), smollm2_checkpoint)
