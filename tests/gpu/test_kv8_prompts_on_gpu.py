"""Prompts over the int8 cache on a GPU, alone and behind context, against float64: needs vLLM's CUDA build."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES, reference
from tests.ops.kv8.batches import Batch, make_batch

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
# (context, new): fresh and continued, some of equal length, a page and not a page.
MIXED = [(0, 17), (33, 5), (16, 16), (0, 16), (0, 32), (47, 130), (300, 7), (130, 2)]


@pytest.fixture
def prefill() -> ModuleType:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.worker import workspace

    from kvcompile.integrations.vllm import attention_prefill

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cuda", 0))
    return attention_prefill


def _new(batch: Batch) -> list[torch.Tensor]:
    """Keys and values of the new tokens alone, [T, G, d]."""
    taken, end = [], 0
    new = batch.query_start_loc.diff().tolist()
    for length, count in zip(batch.seq_lens.tolist(), new, strict=True):
        end += length
        taken.append(torch.arange(end - count, end))
    return [x[torch.cat(taken)] for x in (batch.key, batch.value)]


def _attend(prefill: ModuleType, batch: Batch, first: int = 0) -> tuple[torch.Tensor, int]:
    """The output of the rows from `first` on, from a buffer full of NaN, and the number of spans of context."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = batch.query_start_loc
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens.cuda(),
        num_reqs=batch.seq_lens.shape[0],
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table.cuda(),
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        seq_lens_cpu_upper_bound=batch.seq_lens,
    )
    _, _, block_size, kv_heads, width = batch.cache.shape
    tokens = prefill.workspace_tokens(kv_heads, width - 4)
    prompts = prefill.plan(common, first, block_size, tokens)
    new = slice(int(starts[first]), None)
    query, key, value = (x.cuda()[new] for x in (batch.query, *_new(batch)))
    output = torch.full_like(query, float("nan"))
    flash = prefill.Flash(width - 4)
    prefill.attend(query, key, value, batch.cache.cuda(), prompts, output, batch.scale, flash)
    return output.cpu(), len(prompts.spans)


def _expected(batch: Batch, released: dict[int, int] | None = None) -> torch.Tensor:
    """float64: context as the cache has it, less `released` pages of a row, new tokens as they are."""
    block_size, group = batch.cache.shape[2], batch.query.shape[1] // batch.cache.shape[3]
    keys, values = _new(batch)
    starts, outputs = batch.query_start_loc.tolist(), []
    for row, length in enumerate(batch.seq_lens.tolist()):
        new = slice(starts[row], starts[row + 1])
        count = starts[row + 1] - starts[row]
        positions = torch.arange(block_size * (released or {}).get(row, 0), length - count)
        blocks = batch.block_table[row, positions // block_size].long()
        held = reference.dequantise(batch.cache[blocks, :, positions % block_size])
        k = torch.cat([held[:, 0], keys[new].double()]).repeat_interleave(group, 1)
        v = torch.cat([held[:, 1], values[new].double()]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,thd->hqt", batch.query[new].double(), k) * batch.scale
        later = torch.arange(len(k))[None] > len(positions) + torch.arange(count)[:, None]
        scores.masked_fill_(later, float("-inf"))
        outputs.append(torch.einsum("hqt,thd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def _assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((output.double() - expected).abs() / expected.abs().amax().clamp_min(1.0)).max().item()
    assert error <= TOLERANCE[output.dtype], f"error {error:.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (4, 4)])
def test_fresh_and_continued_prompts_in_one_batch_are_those_of_float64(
    prefill: ModuleType, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(MIXED, heads=heads, kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    output, spans = _attend(prefill, batch)
    assert spans == 1
    _assert_close(output, _expected(batch))


@pytest.mark.parametrize("tokens", [48, 100, 333])
def test_context_longer_than_the_workspace_is_read_in_spans(
    prefill: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    batch = make_batch(MIXED, heads=8, kv_heads=2, head_size=128)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 128)
    output, spans = _attend(prefill, batch)
    assert spans == -(-300 // (tokens // 5))
    _assert_close(output, _expected(batch))


def test_prompts_behind_rows_of_one_token_are_found(prefill: ModuleType) -> None:
    batch = make_batch([(30, 1), (4, 1), (100, 9), (0, 40)], heads=8, kv_heads=2)
    output, _ = _attend(prefill, batch, first=2)
    _assert_close(output, _expected(batch)[2:])


def test_without_context_the_cache_is_not_read(prefill: ModuleType) -> None:
    batch = make_batch([(0, 40), (0, 7)], heads=8, kv_heads=2)
    batch.cache.fill_(-1)
    output, spans = _attend(prefill, batch)
    assert spans == 0
    _assert_close(output, _expected(batch))


def test_released_pages_of_context_are_not_attended_to(prefill: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(100, 9), (64, 40), (0, 5), (48, 30)], heads=8, kv_heads=2, head_size=128)
    released = {0: 2, 1: 4, 3: 1}
    for row, pages in released.items():
        batch.block_table[row, :pages] = 0
    expected = _expected(batch, released)
    for tokens in (1 << 14, 90):
        monkeypatch.setattr(prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 128)
        _assert_close(_attend(prefill, batch)[0], expected)
