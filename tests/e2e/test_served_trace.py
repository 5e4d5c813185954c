"""The scheduler in a real engine, synchronous as on a CPU: tokens of stock vLLM, with aborts under way too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.served_trace import (
    CLASSES,
    OPTIONS,
    Served,
    assert_others_are_unchanged,
    mixed,
    random_aborts,
    random_llama,
    replayed,
    serve,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

TRACE = mixed(24)
ABORTS = random_aborts(len(TRACE), 150)


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Served]]:
    model = random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("schedule") / "model")
    given = [(TRACE, {}), (TRACE, ABORTS)]
    return {system: serve(model, system, given, enforce_eager=True) for system in OPTIONS}


def test_every_request_has_the_tokens_that_vllm_gives_it(served: dict[str, list[Served]]) -> None:
    stock, ours = served["stock"][0], served["kvcompile"][0]
    assert stock.preemptions == 11
    assert ours.preemptions == 0
    assert [len(tokens) for tokens in ours.tokens] == [arrival.output_tokens for arrival in TRACE]
    assert ours.tokens == stock.tokens
    assert len({tuple(tokens[:8]) for tokens in stock.tokens}) == len(TRACE)


@pytest.mark.parametrize("system", OPTIONS)
def test_aborts_under_way_leave_the_others_as_they_were_and_no_block_is_lost(
    served: dict[str, list[Served]], system: str
) -> None:
    whole, aborted = served[system]
    assert len(aborted.aborted) >= 4
    assert any(aborted.tokens[index] for index in aborted.aborted)
    assert_others_are_unchanged(whole, aborted, ABORTS)
    assert (whole.lost_blocks, aborted.lost_blocks) == (0, 0)


@pytest.mark.parametrize("system", OPTIONS)
def test_the_engine_makes_the_steps_of_a_replay(served: dict[str, list[Served]], system: str) -> None:
    run = served[system][0]
    assert (run.asynchronous, run.scheduler) == (False, CLASSES[system, False])
    found = {"steps": run.steps, "preemptions": run.preemptions, "recomputed_tokens": run.recomputed_tokens}
    assert found == replayed(system, TRACE, asynchronous=False)
