"""Prompts over the int8 cache on a GPU, alone and behind context, against float64: needs vLLM's CUDA build."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES
from tests.ops.kv8.batches import Batch, make_batch
from tests.prompts import MIXED, common, expected, new_tokens

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture
def prefill() -> ModuleType:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.worker import workspace

    from kvcompile.integrations.vllm import attention_prefill

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cuda", 0))
    return attention_prefill


def _attend(prefill: ModuleType, batch: Batch, first: int = 0) -> tuple[torch.Tensor, int]:
    """The output of the rows from `first` on, from a buffer full of NaN, and the number of spans of context."""
    _, _, block_size, kv_heads, width = batch.cache.shape
    tokens = prefill.workspace_tokens(kv_heads, width - 4)
    prompts = prefill.plan(common(batch, "cuda"), first, block_size, tokens)
    new = slice(int(batch.query_start_loc[first]), None)
    query, key, value = (x.cuda()[new] for x in (batch.query, *new_tokens(batch)))
    output = torch.full_like(query, float("nan"))
    for each in prefill.workspace(key):  # what others left there
        each.fill_(float("nan"))
    flash = prefill.Flash(width - 4)
    prefill.attend(query, key, value, batch.cache.cuda(), prompts, output, batch.scale, flash)
    return output.cpu(), len(prompts.spans)


def _assert_close(output: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((output.double() - wanted).abs() / wanted.abs().amax().clamp_min(1.0)).max().item()
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
    _assert_close(output, expected(batch))


@pytest.mark.parametrize("tokens", [48, 100, 333])
def test_context_longer_than_the_workspace_is_read_in_spans(
    prefill: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    batch = make_batch(MIXED, heads=8, kv_heads=2, head_size=128)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 128)
    output, spans = _attend(prefill, batch)
    assert spans == -(-sum(context for context, _ in MIXED) // tokens)
    _assert_close(output, expected(batch))


def test_a_vector_that_is_not_finite_reaches_its_own_row_alone(prefill: ModuleType) -> None:
    rows = [(100, 9), (64, 40), (30, 5), (48, 30)]
    batch = make_batch(rows, heads=8, kv_heads=2, head_size=128)
    wanted = expected(batch)
    block = int(batch.block_table[1, 2])
    for half in (0, 1):
        batch.cache[block, half, 3] = -1
        output, _ = _attend(prefill, batch)
        mine = slice(*batch.query_start_loc[1:3].tolist())
        assert output[mine].isnan().all()
        others = torch.ones(len(output), dtype=torch.bool)
        others[mine] = False
        _assert_close(output[others], wanted[others])


def test_prompts_behind_rows_of_one_token_are_found(prefill: ModuleType) -> None:
    batch = make_batch([(30, 1), (4, 1), (100, 9), (0, 40)], heads=8, kv_heads=2)
    output, _ = _attend(prefill, batch, first=2)
    _assert_close(output, expected(batch)[2:])


def test_without_context_the_cache_is_not_read(prefill: ModuleType) -> None:
    batch = make_batch([(0, 40), (0, 7)], heads=8, kv_heads=2)
    batch.cache.fill_(-1)
    output, spans = _attend(prefill, batch)
    assert spans == 0
    _assert_close(output, expected(batch))


def test_released_pages_of_context_are_not_attended_to(prefill: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(100, 9), (64, 40), (0, 5), (48, 30)], heads=8, kv_heads=2, head_size=128)
    released = {0: 2, 1: 4, 3: 1}
    for row, pages in released.items():
        batch.block_table[row, :pages] = 0
    wanted = expected(batch, released)
    for tokens in (1 << 14, 90):
        monkeypatch.setattr(prefill, "WORKSPACE_BYTES", tokens * 4 * 2 * 128)
        _assert_close(_attend(prefill, batch)[0], wanted)
