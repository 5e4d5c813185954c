"""Requests at the edges of pruning in a real engine on a CPU, its books checked after every step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.test_prune_served import BUDGET, OPTIONS, kept_of, prompt
from tests.pruned_engine import FIELDS, Request, serve
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]

NEW, LONGEST = 8, FIELDS["max_model_len"]
LENGTHS = (1, 2, 15, 16, 17, BUDGET, BUDGET + 1, BUDGET + 15, BUDGET + 16, BUDGET + 17, 300)
HEAD, WHOLE = prompt(200, seed=1000), prompt(256, seed=1001)


def asked(new: int) -> list[Request]:
    return [(prompt(length, length), new, {}, None) for length in LENGTHS]


# The longest prompts that there can be, and how many tokens can come after them.
FULL: list[Request] = [(prompt(LONGEST - 1, 1), 1, {}, None), (prompt(LONGEST - 2, 2), NEW, {}, None)]
ALIKE: list[Request] = [(HEAD + prompt(10 + i % 7, i), NEW, {}, None) for i in range(64)]
SAME: list[Request] = [(HEAD, 1 + i % 5, {}, None) for i in range(64)]
# One step computes the first prompt, and its client leaves in it; the others leave in the chunks of theirs.
LEAVING: list[Request] = [(prompt(300, 50 + i), NEW, {}, 1 + i if i < 4 else None) for i in range(6)]
FIRST_WHOLE: list[Request] = [(WHOLE, NEW, {"kv_prune": False}, None)]
THEN_PRUNED: list[Request] = [(WHOLE, NEW, {}, None), (WHOLE, NEW, {"kv_budget_tokens": 200}, None)]
ROUNDS = [asked(NEW), asked(1), FULL, ALIKE, SAME, LEAVING, FIRST_WHOLE, THEN_PRUNED]


def released(tokens: int, budget: int = BUDGET) -> int:
    kept = kept_of(tokens, budget)
    return 0 if kept is None else (tokens - kept) // 16


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("awkward") / "model")


def test_every_request_is_answered_pruned_as_its_length_says_and_leaves_nothing(model: Path) -> None:
    runs = serve(model, OPTIONS, ROUNDS, num_gpu_blocks_override=400)
    counts = [[len(tokens) for tokens in run["tokens"]] for run in runs]
    assert counts[0] == [NEW] * len(LENGTHS) and counts[1] == [1] * len(LENGTHS)
    assert [tokens[:1] for tokens in runs[0]["tokens"]] == runs[1]["tokens"]
    assert counts[2] == [1, 2]
    assert counts[3] == [NEW] * 64 and counts[4] == [1 + i % 5 for i in range(64)]
    assert all(tokens == runs[4]["tokens"][4][: len(tokens)] for tokens in runs[4]["tokens"])
    assert counts[5][4:] == [NEW, NEW] and max(counts[5][:4]) < NEW
    assert [run["left_blocks"] for run in runs] == [0] * len(ROUNDS)
    # What is released is counted on from round to round.
    freed = [after["released_blocks"] - before["released_blocks"] for before, after in pairwise(runs)]
    assert runs[0]["released_blocks"] == freed[0] == sum(map(released, LENGTHS))
    assert freed[1] == released(LONGEST - 1) + released(LONGEST - 2)
    assert freed[2] == sum(released(len(tokens)) for tokens, *_ in ALIKE) and freed[3] == 64 * released(len(HEAD))
    # Of a prompt that lies in the cache whole, no more is hit than what is not rewritten.
    assert freed[5] == 0 and freed[6] == released(256) + released(256, 200)
    assert runs[7]["hits"] == [16 * released(256), 16 * released(256, 200)]


def test_the_same_in_a_pool_that_hardly_holds_one_and_with_kept_tokens_alone_stored(model: Path) -> None:
    inline = {"prune": {**OPTIONS["prune"], "inline": "always"}}
    pool = {"num_gpu_blocks_override": LONGEST // 16 + 2, "max_num_batched_tokens": 2 * LONGEST}
    runs = serve(model, inline, ROUNDS, **pool)
    counts = [[len(tokens) for tokens in run["tokens"]] for run in runs]
    assert counts[:5] == [
        [NEW] * len(LENGTHS),
        [1] * len(LENGTHS),
        [1, 2],
        [NEW] * 64,
        [1 + i % 5 for i in range(64)],
    ]
    assert runs[4]["inline_prompts"] - runs[3]["inline_prompts"] == 64
    assert [run["left_blocks"] for run in runs] == [0] * len(ROUNDS)
