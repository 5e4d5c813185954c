"""The operators are what torch.library asks of one: schema, fake, no hidden aliasing, usable under torch.compile."""

from __future__ import annotations

import pytest
import torch

import kvcompile.ops.kv8  # noqa: F401
from kvcompile.ops.library import register
from tests.ops.kv8.batches import make_batch, poisoned_cache


def _store_arguments() -> tuple[torch.Tensor, ...]:
    key = torch.randn(5, 2, 64, dtype=torch.bfloat16)
    return key, key.clone(), poisoned_cache(2, 16, 2, 64), torch.tensor([3, -1, 20, 0, 31])


def test_opcheck_finds_nothing_wrong_with_the_store() -> None:
    torch.library.opcheck(torch.ops.kvcompile.kv8_store.default, _store_arguments())


@pytest.mark.parametrize("rows", [[(20, 1), (3, 1)], [(0, 9), (20, 1)]])
def test_opcheck_finds_nothing_wrong_with_the_attention(rows: list[tuple[int, int]]) -> None:
    batch = make_batch(rows)
    arguments = (batch.query, batch.cache, *batch.tensors, torch.zeros_like(batch.query), batch.scale)
    torch.library.opcheck(torch.ops.kvcompile.kv8_attention.default, arguments)


def test_both_compile_into_one_graph_with_a_dynamic_number_of_tokens() -> None:
    def step(query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        torch.ops.kvcompile.kv8_store(query * 2, query * 3, cache, slots)
        output = torch.zeros_like(query)
        torch.ops.kvcompile.kv8_attention(query, cache, *batch, output, 0.125)
        return output + query.shape[0]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    for tokens in (2, 5, 9):
        query = torch.randn(tokens, 2, 64, dtype=torch.bfloat16)
        batch = table, torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
        ours, theirs = poisoned_cache(2, 16, 2, 64), poisoned_cache(2, 16, 2, 64)
        slots = torch.arange(16, 16 + tokens)
        assert torch.equal(compiled(query, ours, slots, *batch), step(query, theirs, slots, *batch))
        assert torch.equal(ours, theirs)


def test_the_schemas_say_what_is_written() -> None:
    assert str(torch.ops.kvcompile.kv8_store.default._schema) == (
        "kvcompile::kv8_store(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()"
    )
    assert str(torch.ops.kvcompile.kv8_attention.default._schema) == (
        "kvcompile::kv8_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
        "Tensor query_start_loc, Tensor(a!) output, float scale, Tensor[]? plan=None) -> ()"
    )


def test_registering_a_name_twice_keeps_the_first_kernel() -> None:
    before = torch.ops.kvcompile.kv8_store.default
    again = register(
        "kv8_store(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
        fake=lambda *a: None,
        CPU=lambda *a: pytest.fail("the second kernel ran"),
    )
    assert again is before
    again(*_store_arguments())
