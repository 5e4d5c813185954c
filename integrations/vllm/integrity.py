"""Whether scheduler, block manager and worker agree on who holds which block: for tests, after every step."""

from __future__ import annotations

from collections import Counter
from typing import Any


def check_integrity(scheduler: Any, runner: Any = None) -> None:
    """Raise AssertionError with what disagrees.

    scheduler: vLLM's or ours, with one cache group; runner: one of either version in the same process, between two
    steps. With asynchronous scheduling it may be a step ahead, whose word has not come.
    """
    manager = scheduler.kv_cache_manager
    (single,) = manager.coordinator.single_type_managers
    pool, tables = manager.block_pool, single.req_to_blocks
    held = Counter(block.block_id for blocks in tables.values() for block in blocks if not block.is_null)
    if offload := getattr(scheduler, "offload", None):
        held.update(offload.pins())
        offload.check_integrity()
        ended = offload.books.known() - scheduler.requests.keys()
        assert not ended, f"the host has copies for requests that have ended: {ended}"
    for block in pool.blocks:
        if not block.is_null:
            expected = held[block.block_id]
            assert block.ref_cnt == expected, (
                f"block {block.block_id} has {block.ref_cnt} owners and is in {expected} tables and copies"
            )
    free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
    assert free + len(held) == usable, f"{free} blocks are free and {len(held)} held, of {usable}"
    unknown = {request_id for request_id, blocks in tables.items() if blocks} - scheduler.requests.keys()
    assert not unknown, f"blocks are held for requests that have ended: {unknown}"
    for request_id, plan in getattr(single, "plans", {}).items():
        assert request_id in scheduler.requests, f"a plan is left of {request_id}, which has ended"
        blocks = tables.get(request_id, [])
        null = next((i for i, block in enumerate(blocks) if not block.is_null), len(blocks))
        # Where a load has failed vLLM frees what the request holds when it looks at it next.
        if plan.inline and request_id not in scheduler.failed_recving_kv_req_ids:
            computed = scheduler.requests[request_id].num_computed_tokens
            assert request_id in single.committed, f"{request_id} is to be stored inline and is not"
            assert len(blocks) <= -(-computed // single.block_size), f"{request_id} has {len(blocks)} pages too many"
        expected = plan.released if request_id in single.committed else 0
        assert null == expected, f"{request_id} begins with {null} null blocks, and {expected} were released"
        hashed = [i for i, block in enumerate(blocks) if block.block_hash is not None and i >= plan.released]
        assert not hashed, f"pages {hashed} of {request_id} can be hit and are rewritten"
    if runner is None:
        return
    pending = runner._jobs._to_release if hasattr(runner, "_jobs") else {}
    for request_id, ours in _rows(runner).items():
        if request_id not in tables:
            continue  # ended in this step; the worker hears of it with the next
        if request_id in pending and request_id in single.committed:
            ours[: pending[request_id]] = [0] * pending[request_id]
        theirs = [block.block_id for block in tables[request_id]]
        assert ours == theirs[: len(ours)], f"{request_id}: the worker has blocks {ours}, the scheduler {theirs}"


def _rows(runner: Any) -> dict[str, list[int]]:
    """The worker's table, by request."""
    if hasattr(runner, "input_batch"):
        table, rows = runner.input_batch.block_table[0], runner.input_batch.req_id_to_index
        blocks, counts = table.block_table.np, table.num_blocks_per_row
    else:  # V2
        tables, rows = runner.block_tables, runner.req_states.req_id_to_index
        blocks, counts = tables.block_tables[0].gpu, tables.num_blocks.np[0]
    return {request_id: blocks[row, : counts[row]].tolist() for request_id, row in rows.items()}
