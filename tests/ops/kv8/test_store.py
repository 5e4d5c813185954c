"""`kvcompile::kv8_store`: what it writes, where, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES, kv8_store, reference
from tests.ops.kv8.batches import POISON, poisoned_cache

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _draw(tokens: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, heads, size, generator=torch.Generator().manual_seed(tokens)).mul(3).to(dtype)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_writes_the_very_bytes_of_the_reference(
    head_size: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    key, value = _draw(37, kv_heads, head_size, dtype), _draw(38, kv_heads, head_size, dtype)[1:]
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(1))[:37]
    cache, expected = (poisoned_cache(4, block_size, kv_heads, head_size) for _ in range(2))
    kv8_store(key, value, cache, slots)
    reference.store(key, value, expected, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_back_is_within_half_a_step(dtype: torch.dtype) -> None:
    key = _draw(65, 2, 64, dtype)
    cache = poisoned_cache(5, 16, 2, 64)
    kv8_store(key, key, cache, torch.arange(65))
    read = reference.dequantise(cache[:, 0].reshape(-1, 2, 68)[:65])
    step = key.double().abs().amax(-1, keepdim=True) / 127
    assert ((read - key.double()).abs() <= step * (0.5 + 1e-5)).all()


def test_the_scale_lies_behind_the_data_of_its_own_vector() -> None:
    key = torch.zeros(1, 2, 64)
    key[0, 0, 5], key[0, 1, 6] = 254.0, -127.0
    cache = poisoned_cache(1, 16, 2, 64)
    kv8_store(key, -key, cache, _slots(3))
    assert cache[0, 0, 3, 0, 64:].view(torch.float32).item() == 2.0
    assert cache[0, 0, 3, 1, 64:].view(torch.float32).item() == 1.0
    assert cache[0, 0, 3, 0, 5].item() == 127
    assert cache[0, 0, 3, 1, 6].item() == -127
    assert cache[0, 1, 3, 0, 5].item() == -127
    assert cache[0, 0, 3, 0, :64].count_nonzero().item() == 1


def test_skipped_slots_and_tokens_past_the_mapping_touch_no_memory() -> None:
    key = _draw(4, 2, 64)
    cache = poisoned_cache(2, 16, 2, 64)
    kv8_store(key, key, cache, _slots(-1, 17, -1))
    written = torch.zeros(2, 16, dtype=torch.bool)
    written[1, 1] = True
    assert (cache.transpose(1, 2)[~written] == POISON).all()
    assert torch.equal(cache[1, 0, 1], reference.quantise(key[1]))


@pytest.mark.parametrize("slots", [(), (-1, -1)])
def test_nothing_to_store_changes_nothing(slots: tuple[int, ...]) -> None:
    cache = poisoned_cache(1, 16, 2, 64)
    kv8_store(_draw(2, 2, 64), _draw(2, 2, 64), cache, _slots(*slots))
    assert (cache == POISON).all()


def test_an_all_zero_vector_stays_zero() -> None:
    cache = poisoned_cache(1, 16, 1, 64)
    kv8_store(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), cache, _slots(0))
    assert (reference.dequantise(cache[0, :, 0]) == 0).all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1e-38), (torch.float16, 6e-8), (torch.float32, 1e-42)])
def test_denormal_vectors_give_finite_values_no_larger_than_they_were(dtype: torch.dtype, size: float) -> None:
    key = torch.full((1, 1, 64), size).to(dtype)
    cache = poisoned_cache(1, 16, 1, 64)
    kv8_store(key, -key, cache, _slots(0))
    read = reference.dequantise(cache[0, :, 0])
    assert read.isfinite().all()
    assert (read.abs() <= key.double().abs().max() * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outlier_of_sixty_thousand_is_kept_to_a_step(dtype: torch.dtype) -> None:
    key = torch.ones(1, 1, 64)
    key[0, 0, 9] = -6e4
    key = key.to(dtype)
    cache = poisoned_cache(1, 16, 1, 64)
    kv8_store(key, key, cache, _slots(0))
    read = reference.dequantise(cache[0, 0, 0])
    assert read[0, 9].item() == pytest.approx(-6e4, rel=5e-3)
    assert read[0, 0].item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_reads_as_nan_and_leaves_its_neighbours_alone(bad: float) -> None:
    key = _draw(3, 2, 64, torch.float32)
    key[1, 0, 7] = bad
    cache = poisoned_cache(1, 16, 2, 64)
    kv8_store(key, key, cache, _slots(0, 1, 2))
    read = reference.dequantise(cache[0, 0, :3])
    assert read[1, 0].isnan().all()
    assert torch.equal(cache[0, 0, :3], reference.quantise(key))
    read[1, 0] = 0
    assert read.isfinite().all()


def test_views_into_a_fused_qkv_tensor_are_stored_like_copies() -> None:
    qkv = _draw(5, 6, 64).view(5, -1)
    key, value = (qkv[:, 128 * i : 128 * (i + 1)].view(5, 2, 64) for i in (1, 2))
    cache, copied = (poisoned_cache(1, 16, 2, 64) for _ in range(2))
    kv8_store(key, value, cache, torch.arange(5))
    kv8_store(key.contiguous(), value.contiguous(), copied, torch.arange(5))
    assert torch.equal(cache, copied)


def test_blocks_may_lie_apart_and_the_bytes_between_them_stay() -> None:
    packed = poisoned_cache(2, 16, 2, 64)
    size = packed[0].numel()
    storage = torch.full((2, size + 64), POISON, dtype=torch.int8)
    cache = storage.as_strided(packed.shape, (size + 64, *packed.stride()[1:]))
    key = _draw(32, 2, 64)
    kv8_store(key, key, cache, torch.arange(32))
    kv8_store(key, key, packed, torch.arange(32))
    assert torch.equal(cache, packed)
    assert (storage[:, size:] == POISON).all()


KEY = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
CACHE = poisoned_cache(2, 16, 2, 64)
SLOTS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("argument", "given", "arguments"),
    [
        ("key", "2 dimensions", (KEY[0], KEY, CACHE, SLOTS)),
        ("key", "torch.int32", (KEY.int(), KEY.int(), CACHE, SLOTS)),
        ("key", "head size 48", (KEY[..., :48], KEY[..., :48], CACHE, SLOTS)),
        ("key", "strides", (KEY.transpose(0, 2).contiguous().transpose(0, 2),) * 2 + (CACHE, SLOTS)),
        ("key", "1 heads", (KEY[:, :1], KEY[:, :1], CACHE, SLOTS)),
        ("value", "torch.float32", (KEY, KEY.float(), CACHE, SLOTS)),
        ("value", r"\(1, 2, 64\)", (KEY, KEY[:1], CACHE, SLOTS)),
        ("kv_cache", "torch.uint8", (KEY, KEY, CACHE.view(torch.uint8), SLOTS)),
        ("kv_cache", "shape", (KEY, KEY, CACHE[0], SLOTS)),
        ("kv_cache", "132 bytes", (KEY, KEY, poisoned_cache(2, 16, 2, 128), SLOTS)),
        ("kv_cache", "strides", (KEY, KEY, CACHE.transpose(2, 3).contiguous().transpose(2, 3), SLOTS)),
        ("block_size", "8", (KEY, KEY, poisoned_cache(2, 8, 2, 64), SLOTS)),
        ("kv_cache", "meta", (KEY, KEY, CACHE.to("meta"), SLOTS)),
        ("slot_mapping", "torch.int32", (KEY, KEY, CACHE, SLOTS.int())),
        ("slot_mapping", "3 slots", (KEY, KEY, CACHE, torch.zeros(3, dtype=torch.int64))),
        ("slot_mapping", "slot 32", (KEY, KEY, CACHE, torch.tensor([0, 32]))),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_what_is_allowed(
    argument: str, given: str, arguments: tuple[torch.Tensor, ...]
) -> None:
    with pytest.raises(ValueError, match=rf"^kvcompile::kv8_store: {argument}: given .*{given}.*, allowed "):
        kv8_store(*arguments)
    assert (CACHE == POISON).all()
