"""The scheduler in an engine that schedules asynchronously, under CUDA graphs, against vLLM's AsyncScheduler."""

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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

TRACE = mixed(48)
ABORTS = random_aborts(len(TRACE), 300)
# Other batches round otherwise, so tokens are compared in full precision: Triton's attention takes it, and by itself
# multiplies with 10 bits of it.
FULL_PRECISION = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest"}


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Served]]:
    """Of both systems: the trace to its end, the trace with aborts, and, on the same engine, to its end once more."""
    folder = tmp_path_factory.mktemp("schedule")
    model = random_llama(tiny_llama / "config.json", folder / "model")
    given = [(TRACE, {}), (TRACE, ABORTS), (TRACE, {})]
    environment = {**FULL_PRECISION, "VLLM_CACHE_ROOT": str(folder / "vllm")}
    found = {
        system: serve(model, system, given, environment=environment, attention_backend="TRITON_ATTN")
        for system in OPTIONS
    }
    for system, runs in found.items():
        print(f"\n{system}:", *((r.scheduler, r.steps, r.preemptions, r.recomputed_tokens) for r in runs))
    return found


@pytest.mark.parametrize("system", OPTIONS)
def test_the_engine_schedules_asynchronously_with_the_class_of_the_system(
    served: dict[str, list[Served]], system: str
) -> None:
    for run in served[system]:
        assert (run.asynchronous, run.scheduler) == (True, CLASSES[system, True])


def test_vllm_preempts_and_kvcompile_at_least_a_third_less(served: dict[str, list[Served]]) -> None:
    stock, ours = served["stock"][0], served["kvcompile"][0]
    assert stock.preemptions > 0
    assert 3 * ours.preemptions <= 2 * stock.preemptions
    assert 3 * ours.recomputed_tokens <= 2 * stock.recomputed_tokens


def test_every_request_has_the_tokens_that_vllm_gives_it_and_as_many_as_asked(served: dict[str, list[Served]]) -> None:
    for stock, ours in zip(served["stock"][::2], served["kvcompile"][::2], strict=True):
        assert [len(tokens) for tokens in ours.tokens] == [arrival.output_tokens for arrival in TRACE]
        assert ours.tokens == stock.tokens
    # Answers that do not depend on their prompts would be equal whatever had been read.
    assert len({tuple(tokens[:8]) for tokens in served["stock"][0].tokens}) == len(TRACE)


@pytest.mark.parametrize("system", OPTIONS)
def test_aborts_under_way_leave_the_others_as_they_were(served: dict[str, list[Served]], system: str) -> None:
    whole, aborted, _ = served[system]
    assert len(aborted.aborted) >= 8
    assert any(aborted.tokens[index] for index in aborted.aborted)
    assert_others_are_unchanged(whole, aborted, ABORTS)


@pytest.mark.parametrize("system", OPTIONS)
def test_every_block_is_free_at_the_end_and_the_engine_does_the_same_again(
    served: dict[str, list[Served]], system: str
) -> None:
    assert [run.lost_blocks for run in served[system]] == [0, 0, 0]
    assert served[system][2] == served[system][0]


@pytest.mark.parametrize("system", OPTIONS)
def test_the_engine_makes_the_steps_of_a_replay(served: dict[str, list[Served]], system: str) -> None:
    run = served[system][0]
    found = {"steps": run.steps, "preemptions": run.preemptions, "recomputed_tokens": run.recomputed_tokens}
    assert found == replayed(system, TRACE, asynchronous=True)
