"""`kvcompile::kv8_decode` and `kvcompile::kv8_dequantise` on a CPU, and what every platform refuses."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES, kv8_decode, kv8_dequantise, plan_decode, reference
from tests.ops.kv8.batches import POISON, Batch, make_batch

LENGTHS = [1, 16, 15, 33, 500, 2, 129, 32]


def _decode(batch: Batch, *, planned: bool = False) -> torch.Tensor:
    """The operator's output from a buffer full of NaN."""
    output = torch.full_like(batch.query, float("nan"))
    plan = plan_decode(batch.block_table, batch.seq_lens, batch.cache.shape[2]) if planned else None
    kv8_decode(batch.query, batch.cache, batch.block_table, batch.seq_lens, output, batch.scale, plan)
    return output


def _assert_like_reference(batch: Batch, output: torch.Tensor) -> None:
    expected = reference.attention(batch.query, batch.cache, *batch.tensors, batch.scale)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("planned", [False, True])
def test_decode_is_that_of_float64(head_size: int, planned: bool) -> None:
    batch = make_batch([(n - 1, 1) for n in LENGTHS], heads=6, head_size=head_size, dtype=torch.float32)
    _assert_like_reference(batch, _decode(batch, planned=planned))


def test_rows_without_tokens_give_zeros_wherever_they_stand() -> None:
    batch = make_batch([(-1, 1), (20, 1), (-1, 1), (40, 1)], dtype=torch.float32)
    output = _decode(batch)
    _assert_like_reference(batch, output)
    assert not output[[0, 2]].any()
    assert not _decode(make_batch([(-1, 1)] * 3)).any()


@pytest.mark.parametrize("released", [[1, 0, 3], [2, 2, 4], [0, 1, 6]])
def test_released_pages_are_neither_read_nor_attended_to(released: list[int]) -> None:
    rows = [(47, 1), (40, 1), (99, 1)]
    batch, held = (make_batch(rows, dtype=torch.float32) for _ in range(2))
    for row, pages in enumerate(released):
        batch.block_table[row, :pages] = 0
        held.block_table[row] = held.block_table[row].roll(-pages)
        held.seq_lens[row] -= 16 * pages
    assert (batch.cache[0] == POISON).all()
    expected = reference.attention(held.query, held.cache, *held.tensors, held.scale)
    torch.testing.assert_close(_decode(batch, planned=True).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_released_pages_alone_gives_zeros() -> None:
    batch = make_batch([(31, 1), (40, 1)], dtype=torch.float32)
    batch.block_table[0, :2] = 0
    output = _decode(batch)
    assert not output[0].any() and output[1].any()


def test_dequantised_spans_are_those_of_float64() -> None:
    batch = make_batch([(100, 1), (40, 1), (5, 1), (300, 1)], heads=3, kv_heads=3)
    starts = torch.tensor([0, 60, 60, 64, 300], dtype=torch.int32)
    begins = torch.tensor([16, 3, 1, 64], dtype=torch.int32)
    keys, values = (torch.full((310, 3, 64), 7.0, dtype=torch.float32) for _ in range(2))
    kv8_dequantise(batch.cache, batch.block_table, starts, begins, keys, values)
    for half, found in enumerate((keys, values)):
        at = 0
        for row, (begin, count) in enumerate(zip(begins.tolist(), starts.diff().tolist(), strict=True)):
            for position in range(begin, begin + count):
                stored = batch.cache[int(batch.block_table[row, position // 16]), half, position % 16]
                torch.testing.assert_close(found[at].double(), reference.dequantise(stored), rtol=1e-6, atol=0)
                at += 1
        # Zeros behind the values, for what flash attention reads of them; more than there is room for here.
        assert (found[at:] == (0 if half else 7)).all()


def test_values_behind_the_spans_are_zeros_as_far_as_a_tile_reaches() -> None:
    batch = make_batch([(40, 1)], heads=2)
    starts, begins = torch.tensor([0, 30], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    keys, values = (torch.full((400, 2, 64), float("nan")) for _ in range(2))
    kv8_dequantise(batch.cache, batch.block_table, starts, begins, keys, values)
    assert not values[30:286].any() and values[286:].isnan().all()
    assert keys[30:].isnan().all()


@pytest.mark.parametrize("half", [0, 1])
def test_a_token_that_is_not_finite_has_a_nan_as_its_key_and_zeros_as_its_value(half: int) -> None:
    batch = make_batch([(40, 1)], heads=2)
    block, offset = int(batch.block_table[0, 1]), 5  # position 21
    batch.cache[block, half, offset, 1] = POISON
    starts, begins = torch.tensor([0, 30], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    keys, values = (torch.zeros(30, 2, 64) for _ in range(2))
    kv8_dequantise(batch.cache, batch.block_table, starts, begins, keys, values)
    assert keys[18, 1].isnan().all() and not values[18, 1].any()
    assert keys.isnan().sum() == 64 and values.isfinite().all()


def test_opcheck_finds_nothing_wrong() -> None:
    batch = make_batch([(20, 1), (3, 1)])
    arguments = batch.query, batch.cache, batch.block_table, batch.seq_lens, torch.zeros_like(batch.query), 0.1
    torch.library.opcheck(torch.ops.kvcompile.kv8_decode.default, arguments)
    starts, begins = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    spans = batch.cache, batch.block_table, starts, begins, torch.zeros(9, 2, 64), torch.zeros(9, 2, 64)
    torch.library.opcheck(torch.ops.kvcompile.kv8_dequantise.default, spans)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query": torch.zeros(3, 4, 64), "output": torch.zeros(3, 4, 64)},
            "query: given 3 tokens, allowed one for each of the 2 rows",
        ),
        ({"query": torch.zeros(2, 3, 64)}, "query: given 3 heads, allowed a multiple of the 2 KV heads"),
        ({"output": torch.zeros(2, 4, 80)}, r"output: given torch.float32 \(2, 4, 80\) on cpu, allowed what query has"),
        ({"seq_lens": torch.zeros(2)}, r"seq_lens: given torch.float32 \(2,\) on cpu, allowed torch.int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens: given 3 requests, allowed the 2 rows"),
        ({"scale": -1.0}, "scale: given -1.0, allowed a finite number above 0"),
        ({"settled": True}, "settled: given True without a plan, allowed True with what plan_decode returned"),
        (
            {"block_table": torch.zeros(9, 2, dtype=torch.int32).t()},
            r"block_table: given strides \(1, 2\), allowed stride 1 in the last dimension",
        ),
    ],
)
def test_decode_says_what_does_not_fit(change: dict, message: str) -> None:
    batch = make_batch([(20, 1), (3, 1)], dtype=torch.float32)
    given = {
        "query": batch.query,
        "kv_cache": batch.cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "output": torch.zeros(2, 4, 64),
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=f"^kvcompile::kv8_decode: {message}"):
        kv8_decode(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts: given 2 entries, allowed one more than requests: 3"),
        ({"begins": torch.zeros(3, dtype=torch.int32)}, "begins: given 3 requests, allowed the 2 rows of block_table"),
        ({"keys": torch.zeros(9, 3, 64)}, "values: given .* allowed what keys has"),
        ({"keys": torch.zeros(9, 2, 128)[..., ::2]}, "keys: given strides .* allowed stride 1"),
    ],
)
def test_dequantise_says_what_does_not_fit(change: dict, message: str) -> None:
    batch = make_batch([(20, 1), (3, 1)])
    given = {
        "kv_cache": batch.cache,
        "block_table": batch.block_table,
        "starts": torch.tensor([0, 5, 8], dtype=torch.int32),
        "begins": torch.tensor([2, 0], dtype=torch.int32),
        "keys": torch.zeros(9, 2, 64),
        "values": torch.zeros(9, 2, 64),
    }
    with pytest.raises(ValueError, match=f"^kvcompile::kv8_dequantise: {message}"):
        kv8_dequantise(**{**given, **change})
