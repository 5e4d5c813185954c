"""What the CPU operator computes, against float64, vLLM's RotaryEmbedding, and vLLM's own kernel."""

from __future__ import annotations

import pytest
import torch
import vllm._C  # noqa: F401  vLLM's own kernels
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from kvcompile.ops.rotary import rotary
from tests.ops.rotary.heads import UNIT, Heads, exact, make_heads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 1, 1, 2), (3, 4, 2, 6), (5, 9, 3, 80), (33, 32, 8, 128), (7, 8, 1, 96), (2, 3, 3, 66), (4, 2, 2, 256)]


def native(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's eager forward."""
    head_size = heads.cos_sin_cache.shape[1]
    query, key, positions, table = heads
    return RotaryEmbedding.forward_static(positions, query, key, head_size, head_size, table, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_sums_are_fp32_and_the_result_is_rounded_once(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads = make_heads(*shape, dtype)
    for ours, (turned, sizes) in zip(rotary(*heads), exact(heads), strict=True):
        # In bf16 and fp16 products are exact in fp32, whose own rounding of the sum is in the second term.
        error = (ours.double() - turned).abs()
        assert (error <= UNIT[dtype] * turned.abs() + 3 * UNIT[torch.float32] * sizes + 2.0**-25).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vllms_eager_forward_differs_by_its_rounding_of_each_product_at_most(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads = make_heads(*shape, dtype, seed=1)
    for ours, theirs, (turned, sizes) in zip(rotary(*heads), native(heads), exact(heads), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        # Theirs: a rounding of each product and one of their sum; ours: one.
        bound = UNIT[dtype] * (1.01 * sizes + 2 * 1.01 * turned.abs()) + 2.0**-22
        assert ((ours.double() - theirs.double()).abs() <= bound).all()
        if dtype == torch.float32:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(5, 4, 2, 64), (33, 32, 8, 128)], ids=str)
def test_vllms_own_kernel_differs_by_its_rounding_of_each_product_at_most(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads = make_heads(*shape, dtype, seed=2)
    query, key = heads.query.clone(), heads.key.clone()
    torch.ops._C.rotary_embedding(heads.positions, query, key, shape[3], heads.cos_sin_cache, True)
    for ours, theirs, (turned, sizes) in zip(rotary(*heads), (query, key), exact(heads), strict=True):
        bound = UNIT[dtype] * (1.01 * sizes + 2 * 1.01 * turned.abs())
        assert ((ours.double() - theirs.double()).abs() <= bound).all()


def test_known_heads_give_known_numbers() -> None:
    # A quarter and half a turn, then none.
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 0.0]])
    query = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]])
    turned, key = rotary(query, query[:, 4:], torch.tensor([1, 0]), table)
    assert turned.tolist() == [[-3.0, -2.0, 1.0, -4.0, -7.0, -6.0, 5.0, -8.0], query[1].tolist()]
    assert key.tolist() == [[-7.0, -6.0, 5.0, -8.0], query[1, 4:].tolist()]


def test_turning_back_gives_the_heads_again() -> None:
    heads = make_heads(40, 4, 2, 64, torch.float32)
    cos, sin = heads.cos_sin_cache.chunk(2, 1)
    there = rotary(*heads)
    back = rotary(*there, heads.positions, torch.cat((cos, -sin), 1))
    for x, y in zip(back, heads[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("around", [1, 8])
def test_parts_of_a_wider_tensor_are_turned_as_copies_are_and_stay_as_they_were(around: int) -> None:
    heads = make_heads(6, 4, 2, 64, torch.bfloat16, around=around)
    before = [x.clone() for x in heads]
    ours = rotary(*heads)
    for x, y, of in zip(ours, rotary(*before), heads, strict=False):
        assert torch.equal(x, y) and x.is_contiguous() and x.shape == of.shape
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True))


def test_no_tokens_give_none() -> None:
    query, key = rotary(*make_heads(0, 4, 2, 64, torch.bfloat16))
    assert (query.shape, key.shape) == ((0, 256), (0, 128))


def test_a_head_that_is_not_finite_spoils_no_other() -> None:
    heads = make_heads(3, 4, 2, 8, torch.float32)
    heads.query[1, 8], heads.key[2, 9] = float("nan"), float("inf")
    query, key = rotary(*heads)
    clean = rotary(*(x.nan_to_num(0.0, 0.0) for x in heads[:2]), *heads[2:])
    spoiled = query.view(3, 4, 8)[1, 1].isnan(), ~key.view(3, 2, 8)[2, 1].isfinite()
    assert [x.nonzero().flatten().tolist() for x in spoiled] == [[0, 4], [1, 5]]
    for ours, theirs in zip((query, key), clean, strict=True):
        finite = ours.isfinite()
        assert torch.equal(ours[finite], theirs[finite]) and (~finite).sum() == 2
