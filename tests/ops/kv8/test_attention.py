"""`kvcompile::kv8_attention` against the float64 reference, whatever the mixture of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvcompile.ops.kv8 import HEAD_SIZES, cpu, kv8_attention, plan_attention, reference
from tests.ops.kv8.batches import POISON, Batch, make_batch

# Decode works in fp32. Prefill in bf16 rounds K, V, probabilities and output to 8 bits of mantissa.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
MIXED = [(0, 17), (33, 1), (16, 16), (0, 1), (47, 5), (16, 1), (15, 1), (130, 3)]


def _assert_like_reference(batch: Batch, output: torch.Tensor) -> None:
    expected = reference.attention(batch.query, batch.cache, *batch.tensors, batch.scale)
    scale = expected.abs().amax().clamp_min(1.0)
    error = ((output.double() - expected).abs() / scale).max().item()
    assert error <= TOLERANCE[batch.query.dtype], f"error {error:.2e}"


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2), (16, 1)])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_mixed_batches_match_for_every_head_size_group_and_block_size(
    head_size: int, heads: int, kv_heads: int, block_size: int
) -> None:
    batch = make_batch(MIXED, heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    _assert_like_reference(batch, batch.attend())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_dtype_matches_within_its_tolerance(dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, dtype=dtype)
    _assert_like_reference(batch, batch.attend())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 500])
@pytest.mark.parametrize("block_size", [16, 128])
def test_lengths_around_a_block_boundary_match_in_decode_and_in_prefill(length: int, block_size: int) -> None:
    decode = make_batch([(length - 1, 1)], block_size=block_size, dtype=torch.float32)
    _assert_like_reference(decode, decode.attend())
    prefill = make_batch([(0, length)], block_size=block_size, dtype=torch.float32)
    _assert_like_reference(prefill, prefill.attend())


def test_a_ragged_decode_batch_with_rows_longer_than_a_tile_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 2 * 64 * 64)  # 64 tokens of two heads of 64
    rows = [(length, 1) for length in (0, 3, 62, 63, 64, 65, 127, 300, 1000)]
    batch = make_batch(rows, dtype=torch.float32)
    _assert_like_reference(batch, batch.attend())


def test_prefill_over_several_spans_and_query_tiles_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SPAN_ELEMENTS", 2 * 64 * 32)  # 32 tokens of two heads of 64
    monkeypatch.setattr(cpu, "QUERY_TILE", 24)
    batch = make_batch([(100, 70), (0, 90)], dtype=torch.float32)
    _assert_like_reference(batch, batch.attend())


def test_it_is_close_to_attention_that_was_never_quantised() -> None:
    batch = make_batch([(200, 1)], dtype=torch.float32)
    group = batch.query.shape[1] // batch.key.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (batch.key, batch.value))
    expected = F.scaled_dot_product_attention(batch.query.double().transpose(0, 1), k, v).transpose(0, 1)
    # Half a step of a value is max|v| / 254; the same on keys moves scores by a few percent.
    bound = 0.05 * batch.value.abs().max().item()
    assert (batch.attend().double() - expected).abs().max().item() < bound


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_a_prompt_in_chunks_gives_what_it_gives_in_one_piece(chunk: int) -> None:
    whole = make_batch([(0, 97)], dtype=torch.float32)
    expected = whole.attend()
    for first in range(0, 97, chunk):
        last = min(97, first + chunk)
        output = torch.empty_like(whole.query[first:last])
        kv8_attention(
            whole.query[first:last],
            whole.cache,
            whole.block_table,
            torch.tensor([last], dtype=torch.int32),
            torch.tensor([0, last - first], dtype=torch.int32),
            output,
            whole.scale,
        )
        torch.testing.assert_close(output, expected[first:last], rtol=1e-5, atol=1e-5)


def test_a_fresh_and_a_continued_request_of_equal_length_do_not_mix() -> None:
    batch = make_batch([(0, 48), (32, 16), (47, 1)], dtype=torch.float32)
    assert batch.seq_lens.tolist() == [48, 48, 48]
    _assert_like_reference(batch, batch.attend())


def test_rows_of_length_zero_give_zeros_and_padding_behind_the_batch_stays() -> None:
    batch = make_batch([(20, 1), (4, 3)], dtype=torch.float32)
    batch.seq_lens[:] = 0
    batch.query = torch.cat([batch.query, batch.query])
    output = batch.attend()
    assert (output[:4] == 0).all()
    assert output[4:].isnan().all()


def test_a_batch_of_no_rows_and_a_row_of_no_new_tokens_are_fine() -> None:
    batch = make_batch([(20, 0), (5, 1)], dtype=torch.float32)
    _assert_like_reference(batch, batch.attend())
    empty = make_batch([])
    assert empty.attend().shape == (0, 4, 64)


def test_scores_that_differ_by_thousands_neither_overflow_nor_give_nan() -> None:
    batch = make_batch([(300, 1), (0, 40)], dtype=torch.float32)
    batch.query *= 1e4
    _assert_like_reference(batch, batch.attend())


def test_every_byte_that_no_position_maps_to_is_a_nan_scale_so_that_a_leak_shows() -> None:
    batch = make_batch([(3, 1), (0, 5)])
    scales = batch.cache[..., 64:].contiguous().view(torch.float32)
    assert (~scales.isnan()).sum() == 2 * 2 * (4 + 5)  # K and V, two heads, the tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_request_with_a_nan_spoils_no_other_request(dtype: torch.dtype) -> None:
    rows = [(40, 1), (40, 1), (16, 8), (0, 8), (35, 1)]
    batch = make_batch(rows, dtype=dtype)
    expected = batch.attend()
    broken = [0, *range(2, 10)]  # the tokens of rows 0 and 2
    batch.query[0] = float("nan")
    batch.cache[batch.block_table[2, 0].long(), :, 5, :, -4:] = POISON
    output = batch.attend()
    assert output[broken].isnan().all()
    healthy = [token for token in range(batch.query.shape[0]) if token not in broken]
    assert torch.equal(output[healthy], expected[healthy])


def test_all_zero_keys_average_the_values() -> None:
    batch = make_batch([(31, 1)], dtype=torch.float32)
    keys = batch.cache[:, 0]
    keys[..., :64] = 0
    _assert_like_reference(batch, batch.attend())
    values = reference.dequantise(batch.cache[batch.block_table[0, :2].long(), 1]).reshape(-1, 2, 64)
    mean = values.mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(batch.attend()[0].double(), mean, rtol=1e-4, atol=1e-5)


def test_a_plan_shared_by_layers_gives_the_bits_of_a_call_without_one() -> None:
    batch = make_batch(MIXED)
    assert torch.equal(batch.attend(planned=True), batch.attend())


def test_the_order_of_physical_blocks_does_not_matter() -> None:
    batch = make_batch(MIXED, seed=3)
    expected = batch.attend()
    order = torch.randperm(batch.cache.shape[0], generator=torch.Generator().manual_seed(9))
    batch.cache = batch.cache[order.argsort()].contiguous()
    known = batch.block_table < order.shape[0]
    batch.block_table[known] = order[batch.block_table[known].long()].int()
    assert torch.equal(batch.attend(), expected)


def test_leading_blocks_that_were_released_are_left_out_with_their_tokens() -> None:
    batch = make_batch([(64, 1)], dtype=torch.float32)
    full = reference.attention(batch.query, batch.cache, *batch.tensors, batch.scale)
    batch.block_table, batch.seq_lens = batch.block_table[:, 2:].contiguous(), batch.seq_lens - 32
    output = batch.attend()
    _assert_like_reference(batch, output)
    assert (output.double() - full).abs().max() > 1e-3


BATCH = make_batch([(20, 2)])


@pytest.mark.parametrize(
    ("argument", "given", "change"),
    [
        ("query", "3 heads", {"query": BATCH.query[:, :3], "output": BATCH.query[:, :3]}),
        ("query", "torch.int32", {"query": BATCH.query.int()}),
        ("query", "strides", {"query": BATCH.query.transpose(0, 2).contiguous().transpose(0, 2)}),
        ("kv_cache", "meta", {"kv_cache": BATCH.cache.to("meta")}),
        ("block_table", "meta", {"block_table": BATCH.block_table.to("meta")}),
        ("kv_cache", "132 bytes", {"kv_cache": make_batch([(20, 2)], head_size=128).cache}),
        ("block_table", "torch.int64", {"block_table": BATCH.block_table.long()}),
        ("seq_lens", "torch.int64", {"seq_lens": BATCH.seq_lens.long()}),
        ("seq_lens", "2 requests", {"seq_lens": BATCH.seq_lens.repeat(2)}),
        ("seq_lens", "1000 in row 0", {"seq_lens": torch.tensor([1000], dtype=torch.int32)}),
        ("seq_lens", "1 in row 0", {"seq_lens": torch.tensor([1], dtype=torch.int32)}),
        ("seq_lens", "-4 in row 0", {"seq_lens": torch.tensor([-4], dtype=torch.int32)}),
        ("query_start_loc", "1 entries", {"query_start_loc": torch.zeros(1, dtype=torch.int32)}),
        ("query_start_loc", r"\[1, 2\]", {"query_start_loc": torch.tensor([1, 2], dtype=torch.int32)}),
        ("query_start_loc", "3 tokens", {"query_start_loc": torch.tensor([0, 3], dtype=torch.int32)}),
        ("query_start_loc", r"\[0, -1\]", {"query_start_loc": torch.tensor([0, -1], dtype=torch.int32)}),
        ("query", "0 heads", {"query": BATCH.query[:, :0], "output": BATCH.query[:, :0]}),
        ("kv_cache", "0 blocks", {"kv_cache": BATCH.cache[:0]}),
        ("block_table", "a block outside", {"block_table": torch.full_like(BATCH.block_table, 99)}),
        ("block_table", "a block outside", {"block_table": torch.full_like(BATCH.block_table, -1)}),
        ("query_start_loc", "9 tokens", {"query_start_loc": torch.tensor([0, 9], dtype=torch.int32)}),
        ("scale", "-0.3", {"scale": -0.3}),
        ("scale", "nan", {"scale": float("nan")}),
        ("output", "torch.float32", {"output": BATCH.query.float()}),
        ("output", r"\(1, 4, 64\)", {"output": BATCH.query[:1].clone()}),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_what_is_allowed(
    argument: str, given: str, change: dict[str, torch.Tensor]
) -> None:
    arguments = {
        "query": BATCH.query,
        "kv_cache": BATCH.cache,
        "block_table": BATCH.block_table,
        "seq_lens": BATCH.seq_lens,
        "query_start_loc": BATCH.query_start_loc,
        "output": torch.empty_like(BATCH.query),
        "scale": 0.125,
        **change,
    }
    with pytest.raises(ValueError, match=rf"^kvcompile::kv8_attention: {argument}: given .*{given}.*, allowed "):
        kv8_attention(**arguments)


def test_planning_refuses_what_the_operator_would_refuse() -> None:
    with pytest.raises(ValueError, match="seq_lens: given 1000 in row 0"):
        plan_attention(BATCH.block_table, torch.tensor([1000], dtype=torch.int32), BATCH.query_start_loc, 16, 2, 64)
    with pytest.raises(ValueError, match="block_size: given 8"):
        plan_attention(*BATCH.tensors, 8, 2, 64)
    with pytest.raises(ValueError, match="num_kv_heads: given 0"):
        plan_attention(*BATCH.tensors, 16, 0, 64)
    with pytest.raises(ValueError, match="head_size: given 0"):
        plan_attention(*BATCH.tensors, 16, 2, 0)
