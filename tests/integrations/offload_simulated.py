"""A trace through our scheduler with a simulated worker whose cache holds what would be computed, position by position.

What every step reads is compared with what it has to be, so that a page that was lost, mixed up or restored from a
wrong copy is found in the step that would use it. The worker's half of the connector is the real one, over copies that
take as long as they are told and fail when they are told.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from kvcompile.config import OffloadConfig, PruneConfig, SchedulerConfig
from kvcompile.integrations.vllm import metrics, replay
from kvcompile.integrations.vllm.active import OFFLOAD_CONNECTOR
from kvcompile.integrations.vllm.integrity import check_integrity
from kvcompile.integrations.vllm.offload_length_aware import offloading
from kvcompile.integrations.vllm.offload_messages import Word
from kvcompile.integrations.vllm.offload_worker import OffloadWorker
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS
from kvcompile.integrations.vllm.scheduler import (
    LengthAwareAsyncScheduler,
    LengthAwareScheduler,
    PruningAsyncScheduler,
    PruningLengthAwareAsyncScheduler,
    PruningLengthAwareScheduler,
    PruningScheduler,
)
from kvcompile.offload.host_pool import HostPool
from kvcompile.schedule.trace import Arrival
from tests.integrations.offload_memory import BLOCK, Page, SimulatedCopies
from tests.integrations.replays import STEP

PAGE_BYTES = 2 * BLOCK * 64 * 2  # of the replay's cache: K and V of one head of 64, bf16
WINDOW = 16
FIELDS = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
ORDERS = pytest.mark.parametrize("order", ["vllm", "length"])
KINDS = {
    ("vllm", False, False): Scheduler,
    ("vllm", False, True): AsyncScheduler,
    ("vllm", True, False): PruningScheduler,
    ("vllm", True, True): PruningAsyncScheduler,
    ("length", False, False): LengthAwareScheduler,
    ("length", False, True): LengthAwareAsyncScheduler,
    ("length", True, False): PruningLengthAwareScheduler,
    ("length", True, True): PruningLengthAwareAsyncScheduler,
}


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Rank:
    """One rank's cache and its half of the connector. copies: those of the half, if it has a host pool."""

    def __init__(self, blocks: int, pool_bytes: int, make: Callable[[dict[int, Page], int], SimulatedCopies]) -> None:
        self.device: dict[int, Page] = {block: ["never written"] * BLOCK for block in range(blocks)}
        self.copies: SimulatedCopies | None = None
        self.half = OffloadWorker(pool_bytes, PAGE_BYTES, lambda caches, slots: self._keep(make(self.device, slots)))
        self.half.register({"layer": torch.zeros((2, PAGE_BYTES), dtype=torch.uint8)})

    def _keep(self, copies: SimulatedCopies) -> SimulatedCopies:
        self.copies = copies
        return copies


class SimulatedWorker:
    """Executes what a scheduler says, in order, and checks what it would read. refuses(rng): to prune a request.

    weights: changes with every reset of the prefix cache, and with it what is computed: nothing of before may be read.
    """

    def __init__(
        self,
        scheduler: Any,
        blocks: int,
        make: Callable[[int, dict[int, Page], int], SimulatedCopies],
        refuses: Callable[[random.Random], bool],
        ranks: int,
    ) -> None:
        self.scheduler, self.pruned = scheduler, {}
        self.refuses, self._rng = refuses, random.Random(1)
        pool_bytes = scheduler.offload.books.pool.slots * PAGE_BYTES
        self.ranks = [Rank(blocks, pool_bytes, functools.partial(make, rank)) for rank in range(ranks)]
        self.reads = self.weights = 0
        self._observed: Counter[Any] = Counter()  # of a plan: tokens whose queries were there to score by
        self.shown: Counter[str] = Counter()  # what the scheduler has sent to be shown among vLLM's metrics

    def execute(self, output: Any) -> tuple[list[Word | None], dict[str, int]]:
        """The words of a step, of each rank, and its acknowledgements of pruning."""
        for rank in self.ranks:
            rank.half.execute(output.kv_connector_metadata)
        acknowledged = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            table = [b.block_id for b in self.scheduler.kv_cache_manager.get_blocks(request_id).blocks[0]]
            self._check(request, end - count, table)
            for position in range(end - count, end):
                self._write(table, position, self._computed(request, position))
            step = getattr(output, PLANS, {}).get(request_id)
            if step:
                self._observed[request_id, step.plan] += count
                seen = self._observed[request_id, step.plan]
                assert not step.final or seen >= WINDOW, f"{request_id} is to be scored by {seen} queries"
            if step and step.final and (step.plan.inline or not self.refuses(self._rng)):
                for position in range(step.plan.first, step.plan.tokens):
                    self._write(table, position, ("kept", request_id, step.plan, position))
                acknowledged[request_id] = step.plan.epoch
                self.pruned[request_id] = step.plan
        for rank in self.ranks:
            if rank.copies:
                rank.copies.step()
        return [rank.half.take_word() for rank in self.ranks], acknowledged

    def _write(self, table: list[int], position: int, content: Any) -> None:
        block = table[position // BLOCK]
        if block == 0:
            return  # what inline storing does not keep
        for rank in self.ranks:
            self._may_write(rank.copies, block)
            rank.device[block][position % BLOCK] = content

    def _may_write(self, copies: SimulatedCopies | None, block: int) -> None:
        if copies is None:
            return
        assert block not in copies.written, "a block is written while it is loaded"
        if copies.read[block]:  # nobody waits any more for a copy that has taken too long, and it is never used
            late = [each for each in self.scheduler.offload.transfers.stores.values() if each.block.block_id == block]
            assert late and not any(each.pinned for each in late), "a block is written while it is stored"

    def _check(self, request: Any, computed: int, table: list[int]) -> None:
        null = next((i for i, block in enumerate(table) if block), len(table))
        plan = self.pruned.get(request.request_id)
        if plan is not None and computed < plan.tokens:
            self.pruned.pop(request.request_id)  # it is computed again
            plan = None
        for position in range(null * BLOCK, computed):
            found = [rank.device[table[position // BLOCK]][position % BLOCK] for rank in self.ranks]
            if plan is not None and plan.first <= position < plan.tokens:
                wanted = ("kept", request.request_id, plan, position)
            else:
                wanted = self._computed(request, position)
            assert found == [wanted] * len(found), f"{request.request_id} reads {found} at {position}, not {wanted}"
            self.reads += 1

    def _computed(self, request: Any, position: int) -> Any:
        """Depends on all tokens up to here; generated ones are all alike."""
        prompt = request.prompt_token_ids
        if position < len(prompt):
            return self.weights, hash(tuple(prompt[: position + 1]))
        return self.weights, hash(tuple(prompt)), position


def simulate(
    trace: list[Arrival],
    blocks: int,
    *,
    asynchronous: bool = False,
    host_pages: int = 1000,
    host_memory: bool = True,
    late: Callable[[random.Random], int | None] = lambda rng: 0,
    fails: Callable[[random.Random], bool] = lambda rng: False,
    prune: bool = False,
    inline: str = "auto",
    refuses: Callable[[random.Random], bool] = lambda rng: False,
    aborts: dict[int, int] | None = None,
    after_step: Callable[[Any], None] | None = None,
    order: str = "vllm",
    clock: Callable[[], float] | None = None,
    lose_words: Callable[[], bool] = lambda: False,
    repeat_words: Callable[[], bool] = lambda: False,
    ranks: int = 1,
    **fields: Any,
) -> tuple[Any, replay.Replay, SimulatedWorker]:
    """Scheduler, replay and worker of a trace that has been served, with the books checked after every step."""
    options = {
        "prune": asdict(PruneConfig(enabled=prune, budget_tokens=64, window_tokens=WINDOW, inline=inline)),
        "scheduler": asdict(SchedulerConfig(horizon_steps=1, reserve_ratio=0.0)),  # so that there is pressure
        "offload": asdict(OffloadConfig(enabled=True)),
    }
    config = replay.replay_config(asynchronous=asynchronous, options=options, **{**FIELDS, **fields})
    config.parallel_config.world_size = ranks
    config.kv_transfer_config = KVTransferConfig(kv_connector=OFFLOAD_CONNECTOR, kv_role="kv_both")
    scheduler = replay.make_scheduler(config, blocks, offloading(KINDS[order, prune, asynchronous]))
    scheduler.offload.books.pool = HostPool(host_pages)
    if clock:
        scheduler.offload.transfers.clock = clock

    def copies(rank: int, device: dict[int, Page], slots: int) -> SimulatedCopies:
        if not host_memory:
            raise RuntimeError("no memory")
        return SimulatedCopies(device, slots, late, fails, seed=rank)

    worker = SimulatedWorker(scheduler, blocks, copies, refuses, ranks)
    schedule, update, reset = scheduler.schedule, scheduler.update_from_output, scheduler.reset_prefix_cache
    said: dict[int, Any] = {}
    before: list[Word | None] = [None] * ranks

    def scheduled() -> Any:
        output = schedule()
        said[id(output)] = worker.execute(output)
        return output

    def told(output: Any, result: Any) -> Any:
        words, acknowledged = said.pop(id(output))
        word = None  # as vLLM's executor adds up those of all ranks
        for rank in range(ranks):
            heard = None if lose_words() else words[rank] and words[rank].of_rank(rank)
            for each in (heard, before[rank] if repeat_words() else None):
                word = word.aggregate(each) if word and each else word or each
            before[rank] = heard
        if word or output.num_scheduled_tokens:  # as vLLM's runners do
            result.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=word)
        setattr(result, ACKNOWLEDGED, acknowledged)
        outputs = update(output, result)
        for each in outputs.values():
            for name, by in (metrics.receive(each.scheduler_stats) or {"counts": {}})["counts"].items():
                worker.shown.update({f"{name} {label}".strip(): amount for label, amount in by.items()})
        return outputs

    def forgotten(*args: Any, **kwargs: Any) -> bool:
        done = reset(*args, **kwargs)
        worker.weights += done
        return done

    scheduler.schedule, scheduler.update_from_output, scheduler.reset_prefix_cache = scheduled, told, forgotten

    def checked(run: replay.Replay) -> None:
        check_integrity(scheduler)
        for request in scheduler._inflight_prefills:
            held = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
            assert held or request in scheduler.running, "blocks are kept free for one that has not begun"
        if after_step:
            after_step(run)

    run = replay.Replay(scheduler, config, STEP, aborts=aborts, after_step=checked)
    run.run(trace)
    return scheduler, run, worker


def mixed(requests: int, seed: int = 0, prompt: int = 200, output: int = 120) -> list[Arrival]:
    """Requests that arrive together and grow to much more than a small pool holds; some begin alike."""
    rng = random.Random(seed)
    trace = []
    for _ in range(requests):
        tokens = rng.choice((1, 15, 16, 17, 32, rng.randint(1, prompt)))
        shared = rng.choice((0, 0, tokens // 2 // 16 * 16))
        trace.append(Arrival(0.0, tokens, rng.randint(1, output), output, rng.randint(0, 2), shared))
    return trace


def rounds(times: int, groups: int, prompt: int = 200, own: int = 24) -> list[Arrival]:
    """Of each group, one request a round, when those of the round before have ended; all of a group begin alike."""
    return [
        Arrival(1000.0 * time, prompt - 7 * (group % 3), 6, 6, 1000 * (group + 1), prompt - own - 7 * (group % 3))
        for time in range(times)
        for group in range(groups)
    ]


def soon_or_later(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 5))


def at_times(rng: random.Random) -> bool:
    return rng.random() < 0.3


def always(rng: random.Random) -> bool:
    return True


def some_leave(requests: int, seed: int = 0) -> dict[int, int]:
    rng = random.Random(seed)
    return {index: rng.randint(1, 60) for index in range(0, requests, 3)}


def assert_all_served(run: replay.Replay) -> None:
    for index, life in enumerate(run.outcome.lives):
        assert life.aborted or life.tokens == life.arrival.output_tokens, f"request {index} got {life.tokens} tokens"


def assert_nothing_is_left(scheduler: Any) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.offload.books.known()
    assert not list(scheduler.offload.pins())
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    books = scheduler.offload.books
    assert books.pool.free + len(books.prefixes) == books.pool.slots, "slots are held for nobody"
    scheduler.offload.forget_all()
    assert books.pool.free == books.pool.slots
