"""Copies of pages between a GPU and pinned memory: whole, in the order of the streams, and found out where not."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcompile.integrations.vllm.offload_copies import pages_of
from kvcompile.integrations.vllm.offload_copies_cuda import CUDACopies
from kvcompile.integrations.vllm.offload_messages import Answer, Move, Orders, Word
from kvcompile.integrations.vllm.offload_worker import OffloadWorker
from kvcompile.ops.block_copy.checksum import checksums
from kvcompile.ops.block_copy.pinned import pinned
from kvcompile.ops.kv8 import kv_cache_shape
from tests.integrations.test_offload_worker import PAGE_BYTES, SLOTS, _caches, _worker

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
BLOCKS = 67
A_WHILE = 200_000_000  # cycles of the compute stream, a tenth of a second


def _layers() -> list[torch.Tensor]:
    """int8 pages of Llama-3.1-8B and of one head of 64, a bf16 cache whose pages lie apart, and pages of 16 bytes."""
    generator = torch.Generator(GPU).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=GPU, generator=generator)

    bf16 = draw(3 * BLOCKS, 2, 16, 2, 128)[::3].view(torch.bfloat16)
    return [draw(*kv_cache_shape(BLOCKS, 16, 8, 128)), draw(*kv_cache_shape(BLOCKS, 16, 1, 64)), bf16, draw(BLOCKS, 16)]


def _word(worker: OffloadWorker) -> Word | None:
    torch.cuda.synchronize()
    return worker.take_word()


@pytest.mark.parametrize("count", [1, 2, 7, 33, BLOCKS])
def test_pages_of_layers_unlike_each_other_come_back_bit_for_bit(count: int) -> None:
    layers, rng = _layers(), random.Random(count)
    copies, slots_of_pool = CUDACopies(layers, BLOCKS), list(range(BLOCKS))
    blocks, slots, others = (rng.sample(slots_of_pool, count) for _ in range(3))
    before = [pages_of(layer).clone() for layer in layers]

    copies.start_store(blocks, slots)
    torch.cuda.synchronize()
    (stored,) = copies.ended()
    wanted = torch.cat([pages[blocks] for pages in before], 1).cpu()
    assert torch.equal(copies._pool[slots], wanted)
    assert (stored.why_not, stored.checksums) == ("", checksums(wanted.numpy().view(np.uint64)).tolist())

    for layer in layers:
        pages_of(layer)[blocks] = 0
    after = [pages_of(layer).clone() for layer in layers]
    copies.start_load(slots, others)
    torch.cuda.synchronize()
    (loaded,) = copies.ended()
    assert (loaded.why_not, loaded.checksums) == ("", stored.checksums)
    for layer, old, now in zip(layers, before, after, strict=True):
        now[others] = old[blocks]
        assert torch.equal(pages_of(layer), now)


@pytest.mark.parametrize("pitch_pages", [1, 3])
def test_the_workers_half_has_pages_back_in_other_blocks(pitch_pages: int) -> None:
    caches = _caches(pitch_pages, "cuda")
    worker = _worker(caches, CUDACopies)
    before = {name: cache.clone() for name, cache in caches.items()}
    worker.execute(Orders(stores=(Move(3, 0, 11), Move(5, 4, 12))))
    assert _word(worker).stores == {11: Answer(1), 12: Answer(1)}
    worker.execute(Orders(loads={7: (Move(6, 4, 12), Move(1, 0, 11)), 8: (Move(7, 0, 99),)}))
    assert _word(worker).loads == {7: Answer(1), 8: Answer(1, "stale")}
    for name, cache in caches.items():
        assert torch.equal(cache[[1, 6, 7]], before[name][[3, 5, 7]])


def test_a_store_waits_for_what_was_submitted_before_it_and_nothing_waits_for_the_store() -> None:
    caches = _caches(device="cuda")
    worker = _worker(caches, CUDACopies)
    for cache in caches.values():  # what is loaded at its first use may make the host wait
        cache[3] = 41
    worker.execute(Orders(stores=(Move(0, 0, 9),)))
    assert _word(worker).stores == {9: Answer(1)}
    computed = torch.cuda.Event()
    torch.cuda._sleep(A_WHILE)
    for cache in caches.values():
        cache[3] = 42
    computed.record()
    worker.execute(Orders(stores=(Move(3, 1, 1),)))
    assert worker.take_word() is None and not computed.query()
    assert _word(worker).stores == {1: Answer(1)}
    assert (worker._copies._pool[1] == 42).all()


def test_a_load_waits_for_what_was_submitted_before_it() -> None:
    caches = _caches(device="cuda")
    worker = _worker(caches, CUDACopies)
    before = {name: cache[0].clone() for name, cache in caches.items()}
    worker.execute(Orders(stores=(Move(0, 1, 1),)))
    assert _word(worker).stores == {1: Answer(1)}
    torch.cuda._sleep(A_WHILE)
    for cache in caches.values():
        cache[6] = 42
    worker.execute(Orders(loads={1: (Move(6, 1, 1),)}))
    assert worker.take_word() is None
    assert _word(worker).loads == {1: Answer(1)}
    assert all(torch.equal(cache[6], before[name]) for name, cache in caches.items())


def test_a_bit_that_has_changed_in_the_pool_fails_the_load_of_its_request_alone() -> None:
    worker = _worker(_caches(device="cuda"), CUDACopies)
    worker.execute(Orders(stores=(Move(0, 0, 1), Move(1, 1, 2), Move(2, 2, 3))))
    _word(worker)
    for place in (0, 1000, PAGE_BYTES - 1):
        worker._copies._pool[1, place] ^= 64
        worker.execute(Orders(loads={1: (Move(4, 0, 1),), 2: (Move(5, 1, 2),), 3: (Move(6, 2, 3),)}))
        assert _word(worker).loads == {1: Answer(1), 2: Answer(1, "checksum"), 3: Answer(1)}
        worker._copies._pool[1, place] ^= 64
    worker.execute(Orders(loads={2: (Move(5, 1, 2),)}))
    assert _word(worker).loads == {2: Answer(1)}


def test_batches_of_both_directions_under_way_together_are_all_right() -> None:
    layers, rng = _layers(), random.Random(1)
    copies = CUDACopies(layers, 2 * BLOCKS)
    kept, half = [pages_of(layer).clone() for layer in layers], BLOCKS // 2
    low, high = list(range(half)), list(range(half, 2 * half))
    where = dict(zip(low, rng.sample(range(BLOCKS), half), strict=True))  # slots of the lower blocks
    copies.start_store(list(where), list(where.values()))
    torch.cuda.synchronize()
    copies.ended()
    for turn in range(20):  # the lower blocks come back while the upper ones go, many batches at a time
        rng.shuffle(low)
        for layer in layers:
            pages_of(layer)[low] = 0
        begin = rng.randrange(1, half)
        copies.start_load([where[block] for block in low[:begin]], low[:begin])
        copies.start_store(high, [BLOCKS + block for block in high])
        copies.start_load([where[block] for block in low[begin:]], low[begin:])
        torch.cuda.synchronize()
        assert not [ended for ended in copies.ended() if ended.why_not], turn
        for layer, old in zip(layers, kept, strict=True):
            assert torch.equal(pages_of(layer), old), turn
        wanted = torch.cat([old[high] for old in kept], 1).cpu()
        assert torch.equal(copies._pool[[BLOCKS + block for block in high]], wanted), turn


def test_memory_that_cannot_be_pinned_is_said_and_the_device_goes_on() -> None:
    caches = _caches(device="cuda")
    worker = _worker(caches, CUDACopies, pool_bytes=1 << 50)
    worker.execute(Orders(stores=(Move(0, 0, 1),), loads={1: (Move(0, 0, 1),)}))
    word = _word(worker)
    assert (word.stores, word.loads) == ({1: Answer(1, "no_host_pool")}, {1: Answer(1, "no_host_pool")})
    assert torch.ones(3, device=GPU).sum().item() == 3
    again = _worker(caches, CUDACopies)
    again.execute(Orders(stores=(Move(0, 0, 1),)))
    assert _word(again).stores == {1: Answer(1)}


def _resident_bytes() -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_a_pool_takes_what_it_says_and_gives_all_of_it_back() -> None:
    size = (96 << 20) + 1  # of which torch would make 128 MiB
    first = pinned(size, GPU)
    assert first.is_pinned() and first.numel() == size
    del first
    before = _resident_bytes()
    held = pinned(size, GPU).fill_(1)
    assert _resident_bytes() - before < size + (16 << 20)
    del held
    for _ in range(20):
        pinned(size, GPU).fill_(1)
    assert _resident_bytes() - before < size // 2


def test_a_pool_has_whole_pages() -> None:
    worker = _worker(_caches(device="cuda"), CUDACopies, SLOTS * PAGE_BYTES + PAGE_BYTES - 1)
    assert worker._copies.nbytes == SLOTS * PAGE_BYTES
