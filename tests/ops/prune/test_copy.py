"""`kvcompile::prune_copy`: kept tokens into a cache that never held the prompt."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.prune import pages_of, parse_method, prune_compact, prune_copy, select
from tests.ops.kv8.batches import POISON, poisoned_cache
from tests.ops.prune.prompts import WINDOW, draw_keep, make_prompt


@pytest.mark.parametrize(("length", "kept", "first"), [(101, 53, 48), (101, 1, 0), (40, 40, 7), (96, 33, 100)])
@pytest.mark.parametrize(("head_size", "block_sizes"), [(64, (16, 16)), (80, (48, 16)), (128, (16, 32))])
def test_every_kept_vector_arrives_and_no_other_byte_changes(
    length: int, kept: int, first: int, head_size: int, block_sizes: tuple[int, int]
) -> None:
    theirs, ours = block_sizes
    prompt = make_prompt(length, kv_heads=3, head_size=head_size, block_size=theirs)
    keep = draw_keep(length, kept, 3)
    columns = -(-(first + kept) // ours)
    row = torch.randperm(columns + 2)[:columns].int()
    row[: first // ours] = -5  # not read
    cache = poisoned_cache(columns + 2, ours, 3, head_size)
    expected = cache.clone()
    for head, tokens in enumerate(keep.tolist()):
        for j, position in enumerate(tokens):
            to = first + j
            source = prompt.cache[int(prompt.row[position // theirs]), :, position % theirs, head]
            expected[int(row[to // ours]), :, to % ours, head] = source
    before = prompt.cache.clone()
    prune_copy(prompt.cache, prompt.row, cache, row, keep, first)
    assert torch.equal(cache, expected)
    assert torch.equal(prompt.cache, before)


def test_a_copy_of_tensors_in_flight_is_what_a_stored_prompt_is_compacted_to() -> None:
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(70, 2, 64, generator=generator).bfloat16() for _ in range(2))
    source, source_row = pages_of(key, value)
    keep, first = draw_keep(70, 38, 2), 32
    compacted = source.clone()
    prune_compact([compacted], source_row, [keep], 70, first)
    cache = poisoned_cache(4, 16, 2, 64)
    row = torch.tensor([0, 0, 3, 1, 2], dtype=torch.int32)  # two released columns
    prune_copy(source, source_row, cache, row, keep, first)
    stored = cache[row[2:].long()].transpose(1, 2).flatten(0, 1)[:38]
    assert torch.equal(stored, compacted[source_row[2:].long()].transpose(1, 2).flatten(0, 1)[:38])
    assert (cache[0] == POISON).all()


def test_it_compiles_into_one_graph() -> None:
    method = parse_method("blend", window=WINDOW)
    prompt = make_prompt(60)
    keep = select(prompt.score(method), method, 28)
    ours, theirs = poisoned_cache(5, 16, 2, 64), poisoned_cache(5, 16, 2, 64)
    row = torch.tensor([0, 0, 3, 1], dtype=torch.int32)
    compiled = torch.compile(prune_copy, fullgraph=True, backend="aot_eager")
    compiled(prompt.cache, prompt.row, ours, row, keep, 32)
    prune_copy(prompt.cache, prompt.row, theirs, row, keep, 32)
    assert torch.equal(ours, theirs)
    torch.library.opcheck(
        torch.ops.kvcompile.prune_copy.default, (prompt.cache, prompt.row, ours, row, keep.clone(), 32)
    )


def _arguments() -> dict:
    prompt = make_prompt(64)
    return {
        "source_cache": prompt.cache,
        "source_row": prompt.row,
        "kv_cache": poisoned_cache(5, 16, 2, 64),
        "block_table_row": torch.tensor([0, 0, 3, 1], dtype=torch.int32),
        "keep": draw_keep(64, 32, 2),
        "first": 32,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": -1}, "first: given -1, allowed 0 or more"),
        ({"first": 33}, r"first \+ kept: given 65 tokens, allowed at most the 64 that block_table_row has room for"),
        ({"keep": torch.arange(32).expand(2, -1)}, r"keep: given torch.int64 \(2, 32\) on cpu, allowed torch.int32"),
        ({"keep": torch.arange(32, dtype=torch.int32)}, r"keep: given torch.int32 \(32,\) on cpu"),
        ({"keep": torch.zeros(3, 9, dtype=torch.int32)}, r"keep: given shape \(3, 9\), allowed \(2, 1 or more\)"),
        ({"keep": torch.zeros(2, 0, dtype=torch.int32)}, r"keep: given shape \(2, 0\), allowed \(2, 1 or more\)"),
        ({"keep": torch.zeros(2, 32, dtype=torch.int32)}, "keep: given positions from 0 to 0, allowed positions that"),
        (
            {"keep": torch.arange(70, 102, dtype=torch.int32).expand(2, -1)},
            "keep: given positions from 70 to 101, allowed positions that ascend, each once, from 0 to 95",
        ),
        (
            {"source_row": torch.zeros(1, dtype=torch.int32)},
            "keep: given 32 tokens, allowed at most the 16 that source_row has room for",
        ),
        ({"source_row": torch.full((4,), 99, dtype=torch.int32)}, "source_row: given block 99, allowed 0 to 6"),
        ({"block_table_row": torch.zeros(4)}, "block_table_row: given torch.float32"),
        (
            {"block_table_row": torch.tensor([0, 0, 3, 3], dtype=torch.int32)},
            "block_table_row: given block 3 twice, allowed each block once",
        ),
        (
            {"block_table_row": torch.tensor([0, 0, 3, 5], dtype=torch.int32)},
            "block_table_row: given block 5, allowed 0 to 4",
        ),
        ({"kv_cache": poisoned_cache(5, 16, 4, 64)}, "kv_cache: given 4 heads of 64, allowed those of source_cache: 2"),
        ({"kv_cache": poisoned_cache(5, 16, 2, 80)}, "kv_cache: given 2 heads of 80, allowed those of source_cache"),
        ({"source_cache": torch.zeros(7, 2, 16, 2, 68)}, r"source_cache: given torch.float32 .* allowed torch.int8"),
    ],
)
def test_it_says_what_does_not_fit_and_writes_nothing(change: dict, message: str) -> None:
    arguments = {**_arguments(), **change}
    before = arguments["kv_cache"].clone()
    with pytest.raises(ValueError, match=f"^kvcompile::prune_copy: {message}"):
        prune_copy(**arguments)
    assert torch.equal(arguments["kv_cache"], before)


def test_within_one_cache_it_refers_to_the_compaction() -> None:
    arguments = _arguments()
    with pytest.raises(ValueError, match="source_cache: given kv_cache itself, allowed another tensor; prune_compact"):
        prune_copy(**{**arguments, "kv_cache": arguments["source_cache"]})
