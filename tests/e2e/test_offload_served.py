"""Host offload in a real engine on a CPU: the tokens of a pool in which nobody is preempted, whatever goes wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvcompile.schedule.trace import Arrival
from tests import offload_engine
from tests.served_trace import mixed, random_aborts, random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

LARGE, SMALL = 400, 50
OFFLOAD = {"enabled": True, "cpu_bytes_to_use": 8 << 20}
STOCK_ORDER = {"scheduler": {"enabled": False}}
TRACE, SHORT = mixed(200), mixed(40)
ABORTS = random_aborts(len(TRACE), 900)

# Copies that fail, and host memory that changes, at random.
FAILING = """
def make_it_fail(copies):
    import random
    rng, store, load = random.Random(0), copies.start_store, copies.start_load
    def start(work, *given):
        if rng.random() < 0.2:
            raise RuntimeError("injected")
        batch = work(*given)
        if rng.random() < 0.2:
            copies._pool[rng.randrange(len(copies._pool))] ^= 1
        return batch
    copies.start_store = lambda *given: start(store, *given)
    copies.start_load = lambda *given: start(load, *given)
from vllm.distributed.kv_transfer import get_kv_transfer_group
make_it_fail(get_kv_transfer_group()._worker._copies)
"""
NO_POOL = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
get_kv_transfer_group()._worker._copies = None
"""


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("offload") / "model")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[list[int]]]:
    """Tokens of both traces where nobody is preempted."""
    runs = offload_engine.serve(model, STOCK_ORDER, [(TRACE, {}), (SHORT, {})], blocks=LARGE)
    assert [run["preemptions"] for run in runs] == [0, 0]
    return [run["tokens"] for run in runs]


def assert_tokens(run: dict[str, Any], wanted: list[list[int]]) -> None:
    for index, (found, whole) in enumerate(zip(run["tokens"], wanted, strict=True)):
        if index in run["aborted"]:
            assert found == whole[: len(found)], index
        else:
            assert found == whole, index
    assert (run["left_blocks"], run["known"]) == (0, 0)


@pytest.mark.parametrize("order", [STOCK_ORDER, {"scheduler": {"horizon_steps": 1}}], ids=["stock", "length"])
def test_two_hundred_requests_with_aborts_have_the_tokens_of_a_pool_that_never_preempts(
    model: Path, wanted: list[list[list[int]]], order: dict[str, Any]
) -> None:
    (run,) = offload_engine.serve(model, {**order, "offload": OFFLOAD}, [(TRACE, ABORTS)], blocks=SMALL)
    assert_tokens(run, wanted[0])
    assert len(run["aborted"]) > 20
    assert run["preemptions"] > 40 and run["restores"] > 0.9 * run["preemptions"]
    # Stock vLLM loses whatever a preemption frees.
    assert run["freed_blocks"] > 200
    assert run["lost_blocks"] <= 0.05 * run["freed_blocks"]
    assert run["recomputed_tokens"] == 0
    assert 0 < run["pool_bytes"] <= OFFLOAD["cpu_bytes_to_use"]


@pytest.mark.parametrize("code", [FAILING, NO_POOL], ids=["failing copies", "no pool"])
def test_failures_cost_computing_again_and_no_token(model: Path, wanted: list[list[list[int]]], code: str) -> None:
    options = {**STOCK_ORDER, "offload": OFFLOAD}
    (run,) = offload_engine.serve(model, options, [(SHORT, {})], blocks=SMALL, code=code)
    assert_tokens(run, wanted[1])
    assert run["preemptions"] > 10
    if code == NO_POOL:
        assert run["restores"] == 0 and "NO_POOL" in run["fallbacks"]
    else:
        assert run["restores"] > 0 and set(run["fallbacks"]) == {"COPY_LOST", "LOAD_FAILED"}


def test_pruned_requests_come_back_pruned_and_go_on_as_if_nothing_had_been(model: Path) -> None:
    rng = random.Random(2)
    trace = [Arrival(0.0, rng.randint(50, 180), rng.randint(30, 70), 70) for _ in range(40)]
    prune = {"enabled": True, "budget_tokens": 64, "window_tokens": 16}
    (whole,) = offload_engine.serve(model, {**STOCK_ORDER, "prune": prune}, [(trace, {})], blocks=LARGE)
    options = {**STOCK_ORDER, "prune": prune, "offload": OFFLOAD}
    (run,) = offload_engine.serve(model, options, [(trace, {})], blocks=30)
    assert whole["preemptions"] == 0
    assert_tokens(run, whole["tokens"])
    assert run["preemptions"] > 10 and run["restores"] > 10
