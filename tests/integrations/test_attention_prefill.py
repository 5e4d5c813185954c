"""Prompts over the int8 cache: plan and composition on a CPU, with float64 in the place of flash attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.integrations.vllm import attention_cuda, attention_prefill
from kvcompile.integrations.vllm.attention_prefill import Prompts
from kvcompile.ops.kv8 import cuda
from tests.ops.kv8.batches import Batch, make_batch
from tests.prompts import MIXED, common, expected, new_tokens


class Exact:
    """`attention_prefill.Flash` in float64: rows without keys give NaN and minus infinity, as real ones may."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        key_starts: torch.Tensor,
        longest_key: int,
        scale: float,
        *,
        causal: bool,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = query.shape[1] // key.shape[1]
        out = torch.full_like(query, float("nan")) if out is None else out
        lse = torch.full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float64)
        bounds, key_bounds = prompts.starts.tolist(), key_starts.tolist()
        assert longest_key >= max(key_starts.diff().tolist())
        assert prompts.longest >= max(prompts.starts.diff().tolist())
        for row in range(len(bounds) - 1):
            mine, keys = slice(*bounds[row : row + 2]), slice(*key_bounds[row : row + 2])
            if keys.start == keys.stop:
                continue
            k, v = (x[keys].double().repeat_interleave(group, 1) for x in (key, value))
            scores = torch.einsum("qhd,thd->hqt", query[mine].double(), k) * scale
            if causal:
                scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
            out[mine] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v).to(out.dtype)
            lse[:, mine] = scores.logsumexp(-1)
        return out, lse


def _merge(output: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, lse: Any) -> None:
    """As vLLM's `merge_attn_states`: a part without keys counts for nothing, whatever it holds."""
    lse.copy_(torch.logaddexp(prefix_lse, suffix_lse))
    parts = []
    for part, part_lse in ((prefix, prefix_lse), (suffix, suffix_lse)):
        weight = (part_lse - lse).exp().t()[..., None]
        parts.append(torch.where(weight > 0, weight * part.double(), 0.0))
    output.copy_(sum(parts).to(output.dtype))


@pytest.fixture(autouse=True)
def vllm_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.ops import merge_attn_states

    def workspace(like: torch.Tensor) -> list[torch.Tensor]:
        _, heads, head_size = like.shape
        shape = attention_prefill.workspace_tokens(heads, head_size), heads, head_size
        return [torch.full(shape, float("nan"), dtype=like.dtype) for _ in range(2)]

    monkeypatch.setattr(merge_attn_states, "merge_attn_states", _merge)
    monkeypatch.setattr(attention_prefill, "workspace", workspace)


def _attend(batch: Batch, first: int = 0) -> tuple[torch.Tensor, int]:
    """The output of the rows from `first` on, from a buffer full of NaN, and the number of spans of context."""
    _, _, block_size, kv_heads, width = batch.cache.shape
    tokens = attention_prefill.workspace_tokens(kv_heads, width - 4)
    prompts = attention_prefill.plan(common(batch, "cpu"), first, block_size, tokens)
    new = slice(int(batch.query_start_loc[first]), None)
    query, key, value = (x[new] for x in (batch.query, *new_tokens(batch)))
    output = torch.full_like(query, float("nan"))
    attention_prefill.attend(query, key, value, batch.cache, prompts, output, batch.scale, Exact())
    return output, len(prompts.spans)


def _assert_close(output: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(output.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [None, 48, 100, 333])
def test_fresh_and_continued_prompts_are_those_of_float64_however_small_the_workspace(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    batch = make_batch(MIXED, dtype=torch.float32)
    if tokens:
        monkeypatch.setattr(attention_prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 64)
    output, spans = _attend(batch)
    # Rows share a span, and a long one has as many as it needs.
    assert spans == (-(-sum(context for context, _ in MIXED) // tokens) if tokens else 1)
    _assert_close(output, expected(batch))


def test_prompts_behind_rows_of_one_token_are_found() -> None:
    batch = make_batch([(30, 1), (4, 1), (100, 9), (0, 40)], dtype=torch.float32)
    _assert_close(_attend(batch, first=2)[0], expected(batch)[2:])


def test_without_context_the_cache_is_not_read() -> None:
    batch = make_batch([(0, 40), (0, 7)], dtype=torch.float32)
    batch.cache.fill_(-1)
    output, spans = _attend(batch)
    assert spans == 0
    _assert_close(output, expected(batch))


@pytest.mark.parametrize("tokens", [1 << 12, 90])
def test_released_pages_of_context_are_not_attended_to(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    batch = make_batch([(100, 9), (64, 40), (0, 5), (48, 30)], dtype=torch.float32)
    released = {0: 2, 1: 4, 3: 1}
    for row, pages in released.items():
        batch.block_table[row, :pages] = 0
    monkeypatch.setattr(attention_prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 64)
    _assert_close(_attend(batch)[0], expected(batch, released))


def test_a_long_row_among_short_ones_takes_no_more_spans_than_all_tokens_need() -> None:
    context = [200] * 15 + [200_000, 0] + [200] * 16
    spans = attention_prefill.divide(context, 16384)
    assert len(spans) == -(-sum(context) // 16384) == 13
    assert all(sum(count for _, count in span) <= 16384 for span in spans)
    for row, length in enumerate(context):
        pieces = [span[row] for span in spans if span[row][1]]
        assert [begin for begin, _ in pieces] == [sum(count for _, count in pieces[:i]) for i in range(len(pieces))]
        assert sum(count for _, count in pieces) == length
    assert attention_prefill.divide([0, 0], 16384) == []


def test_a_plan_needs_vllms_bound_on_lengths() -> None:
    given = common(make_batch(MIXED), "cpu").replace(seq_lens_cpu_upper_bound=None)
    with pytest.raises(RuntimeError, match="no bound on sequence lengths"):
        attention_prefill.plan(given, 0, 16, 4096)


@pytest.mark.parametrize(
    ("rows", "decodes", "prompts"),
    [
        ([(30, 1), (4, 1), (100, 9), (0, 40)], 2, 2),
        ([(30, 1), (4, 1)], 2, 0),
        ([(0, 40), (7, 2)], 0, 2),
        ([(0, 1), (3, 1)], 2, 0),  # a prompt of one token is a decode without context
    ],
)
def test_the_builder_divides_a_step_into_decodes_and_prompts(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], decodes: int, prompts: int
) -> None:
    planned = []
    monkeypatch.setattr(cuda, "plan_into", lambda *arguments: planned.append(arguments))
    builder = object.__new__(attention_cuda.KV8MetadataBuilder)
    memory = {"offsets": "offsets", "first_page": "first page"}
    builder.__dict__.update(block_size=16, workspace_tokens=4096, rows_share=False, **memory)
    batch = make_batch(rows)
    given = common(batch, "cpu")
    found = builder.build(0, given)
    assert (found.decodes, found.num_tokens) == (decodes, len(batch.query))
    assert found.settled == (prompts == 0)
    assert (found.prompts.starts.shape[0] - 1 if found.prompts else 0) == prompts
    assert found.slot_mapping.shape == (len(batch.query),)
    # Of all rows, for prompts that are to be pruned: where they begin is known without waiting for the device.
    assert found.starts is given.query_start_loc_cpu and found.rows is given.block_table_tensor
    if decodes:
        ((table, lengths, block_size, *memory),) = planned
        assert torch.equal(table, batch.block_table[:decodes]) and torch.equal(lengths, batch.seq_lens[:decodes])
        # The builder's own memory, which a captured graph reads again and again.
        assert (block_size, memory) == (16, ["offsets", "first page"]) and found.plan == memory
    else:
        assert not planned


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"alibi_slopes": [1.0]}, "alibi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a logit soft cap"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "KV sharing between layers"),
        ({"kv_cache_dtype": "auto"}, "KV cache dtype auto"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch, given: dict, what: str) -> None:
    monkeypatch.setattr(attention_prefill, "Flash", SimpleNamespace)
    plain = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "int8_per_token_head"}
    with pytest.raises(ValueError, match=f"^the KV8 backend does not support {what}$"):
        attention_cuda.KV8Impl(8, 64, 0.125, 2, **{**plain, **given})
