"""Schedulers over a simulated worker, for tests: small pools, short traces."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile.config import SchedulerConfig
from kvcompile.integrations.vllm import replay
from kvcompile.integrations.vllm.scheduler import make_scheduler
from kvcompile.schedule.trace import Arrival, StepTime

STEP = StepTime(base_s=1e-2, per_prefill_token_s=1e-5, per_decode_request_s=1e-5, per_context_token_s=1e-8)


def scheduler_of(
    blocks: int, *, options: dict[str, Any] | None = None, stock: bool = False, asynchronous: bool = True, **fields: Any
) -> tuple[Scheduler, Any]:
    """A scheduler, ours with these options of `scheduler.*` or vLLM's, and the configuration that it is of."""
    config = replay.replay_config(
        asynchronous=asynchronous,
        options=None if stock else {"scheduler": asdict(SchedulerConfig(**(options or {})))},
        **{"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 1024, **fields},
    )
    return replay.make_scheduler(config, blocks, replay.stock(config) if stock else make_scheduler), config


def replay_of(trace: list[Arrival], blocks: int, *, after_step: Any = None, **fields: Any) -> replay.Replay:
    """The replay of a trace, done; its `outcome` is what came of it."""
    scheduler, config = scheduler_of(blocks, **fields)
    done = replay.Replay(scheduler, config, STEP, after_step=after_step)
    done.run(trace)
    return done


def pressing(requests: int, seed: int = 0, *, prompt: int = 300, output: int = 200, limit: int = 400) -> list[Arrival]:
    """Requests that arrive together and grow as long again as they were."""
    rng = random.Random(seed)
    return [Arrival(0.0, rng.randint(1, prompt), rng.randint(1, output), limit) for _ in range(requests)]


def assert_blocks_add_up(scheduler: Scheduler) -> None:
    """Every block is free or held, never both, and held by as many requests as it counts."""
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    held: dict[int, int] = {}
    for request in scheduler.running:
        for block in manager.get_blocks(request.request_id).blocks[0]:
            held[block.block_id] = held.get(block.block_id, 0) + 1
    for request in scheduler.waiting:
        assert not manager.get_blocks(request.request_id).blocks[0]
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(held)
    counted = {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null}
    assert counted == held
