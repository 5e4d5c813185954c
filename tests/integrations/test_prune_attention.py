"""Prompts that are to be pruned, in a step of the GPU backend: each is shown its own tokens, be it one or more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.integrations.vllm import attention_cuda, attention_prefill
from kvcompile.integrations.vllm.attention_shared import attach
from kvcompile.integrations.vllm.prune_jobs import Job
from kvcompile.ops.kv8 import cuda
from kvcompile.prune.plan import Plan
from tests.ops.kv8.batches import POISON, Batch, make_batch
from tests.prompts import common, new_tokens

WINDOW = 4


def ending(tokens: int, **fields: Any) -> Job:
    """The job of a prompt that ends in this step, with its scores from what it is shown."""

    def score(layer: str, queries: torch.Tensor, cache: torch.Tensor, row: torch.Tensor, *numbers: Any) -> Any:
        return SimpleNamespace(layer=layer, queries=queries, row=row, numbers=numbers, nbytes=0)

    return Job(Plan(tokens, 1, 16, 0), WINDOW, score, lambda scores, kept: scores, final=True, **fields)


def slots(batch: Batch) -> torch.Tensor:
    """int64 [T]: where the new tokens are in the cache already."""
    found, counts = [], batch.query_start_loc.diff().tolist()
    for row, (length, new) in enumerate(zip(batch.seq_lens.tolist(), counts, strict=True)):
        positions = torch.arange(length - new, length)
        found.append(batch.block_table[row, positions // 16].long() * 16 + positions % 16)
    return torch.cat(found)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`forward(batch, jobs)`: a layer of a step, with its kernels on a CPU and no attention of prompts."""
    monkeypatch.setattr(cuda, "plan_into", lambda *_: None)
    monkeypatch.setattr(attention_prefill, "Flash", lambda head_size: None)
    monkeypatch.setattr(attention_prefill, "attend", lambda *_: None)
    monkeypatch.setattr(attention_cuda, "kv8_decode", lambda *_: None)
    builder = object.__new__(attention_cuda.KV8MetadataBuilder)
    builder.__dict__.update(block_size=16, workspace_tokens=4096, offsets=None, first_page=None, rows_share=True)
    heads = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "int8_per_token_head"}
    impl = attention_cuda.KV8Impl(4, 64, 0.5, 2, **heads)

    def run(batch: Batch, jobs: dict[int, Job], prefix_caching: bool = True) -> None:
        builder.rows_share = prefix_caching
        metadata = builder.build(0, common(batch, "cpu").replace(slot_mapping=slots(batch)))
        attach([metadata, metadata], jobs)
        keys, values = new_tokens(batch)
        impl.forward(
            SimpleNamespace(layer_name="a"), batch.query, keys, values, batch.cache, metadata, batch.query.clone()
        )

    return run


def test_rows_of_one_token_and_of_more_are_scored_by_their_own_window(forward: Any) -> None:
    batch = make_batch([(30, 1), (79, 1), (100, 9), (0, 40)])
    # What the chunk before has left of the second one's window.
    earlier = torch.randn(WINDOW, *batch.query.shape[1:]).to(batch.query.dtype)
    jobs = {1: ending(80, queries={"a": earlier}), 3: ending(40)}
    forward(batch, jobs)
    starts = batch.query_start_loc.tolist()
    for row, window, tokens in (
        (1, torch.cat([earlier[1:], batch.query[starts[1] : starts[2]]]), 80),
        (3, batch.query[starts[4] - WINDOW : starts[4]], 40),
    ):
        cache, table_row, seen = jobs[row].scored["a"]
        assert cache is batch.cache
        assert torch.equal(table_row, batch.block_table[row]) and torch.equal(seen.row, batch.block_table[row])
        assert torch.equal(seen.queries, window)
        assert (seen.layer, seen.numbers) == ("a", (tokens, 0.5))


def test_of_a_prompt_that_is_stored_inline_no_token_is_stored_as_it_comes(forward: Any) -> None:
    batch = make_batch([(30, 1), (0, 40), (0, 20)])
    job = ending(40)
    job.plan = replace(job.plan, inline=True)
    job.score = lambda *_: torch.arange(8, 32, dtype=torch.int32).repeat(2, 1)
    whole, pages = batch.cache.clone(), batch.block_table[1, :3].long()
    batch.cache[pages] = POISON
    wanted = batch.cache.clone()
    # The kept ones, compactly, from the first position behind what is released.
    wanted[pages[1]] = torch.cat([whole[pages[0], :, 8:], whole[pages[1], :, :8]], 1)
    wanted[pages[2], :, :8] = whole[pages[1], :, 8:]
    forward(batch, {1: job})
    assert job.stored == {"a"} and not job.keeps
    assert torch.equal(batch.cache, wanted)


def test_pages_are_read_while_a_step_still_stores_only_where_no_other_row_may_store_them(
    forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = []
    monkeypatch.setattr(attention_cuda, "kv8_decode", lambda *arguments: settled.append(arguments[-1]))
    forward(make_batch([(30, 1), (79, 1)]), {}, prefix_caching=False)
    forward(make_batch([(30, 1), (79, 1)]), {}, prefix_caching=True)
    forward(make_batch([(30, 1), (0, 40)]), {}, prefix_caching=False)
    assert settled == [True, False, False]
