"""The worker's half of offload over a GPU's copies, of which streams and kernels are those of tests/ops/block_copy."""

from __future__ import annotations

import random

import pytest
import torch
from vllm.platforms import current_platform

from kvcompile.integrations.vllm import offload_copies_cuda
from kvcompile.integrations.vllm.offload_copies import Copies, CPUCopies, pages_of
from kvcompile.integrations.vllm.offload_copies_cuda import CUDACopies
from kvcompile.integrations.vllm.offload_messages import Answer, Move, Orders
from kvcompile.integrations.vllm.offload_worker import OffloadWorker, copies_of_platform
from kvcompile.ops.block_copy.ring import ring_bytes
from tests.integrations.test_offload_worker import BLOCKS, PAGE_BYTES, SLOTS, _caches, _worker
from tests.ops.block_copy.streams import GPU, Event, gpu_on_cpu

LAYERS = 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    return gpu_on_cpu(monkeypatch)


def _run(worker: OffloadWorker, gpu: GPU) -> None:
    gpu.compute.run()
    for direction in (worker._copies._stores, worker._copies._loads):
        direction._stream.run()


def _answers(worker: OffloadWorker, gpu: GPU, orders: Orders) -> tuple[dict[int, Answer], dict[int, Answer]]:
    worker.execute(orders)
    _run(worker, gpu)
    word = worker.take_word()
    return dict(word.stores), dict(word.loads)


@pytest.mark.parametrize(("on_cpu", "wanted"), [(True, CPUCopies), (False, CUDACopies)])
def test_each_platform_has_its_copies(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, wanted: type[Copies]) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    assert copies_of_platform() is wanted


@pytest.mark.parametrize("pitch_pages", [1, 3])
def test_pages_come_back_and_are_spoken_of_when_they_have(gpu: GPU, pitch_pages: int) -> None:
    caches = _caches(pitch_pages)
    worker = _worker(caches, CUDACopies)
    before = {name: cache.clone() for name, cache in caches.items()}
    worker.execute(Orders(stores=(Move(3, 0, 11), Move(5, 4, 12))))
    assert worker.take_word() is None
    _run(worker, gpu)
    assert worker.take_word().stores == {11: Answer(1), 12: Answer(1)}
    for cache in caches.values():
        cache[[3, 5]] = 0
    worker.execute(Orders(loads={7: (Move(6, 4, 12), Move(1, 0, 11))}))
    assert worker.take_word() is None
    _run(worker, gpu)
    assert worker.take_word().loads == {7: Answer(1)}
    for name, cache in caches.items():
        assert torch.equal(cache[[1, 6]], before[name][[3, 5]])
        assert torch.equal(cache[[0, 2, 4, 7]], before[name][[0, 2, 4, 7]])


def test_a_store_reads_what_the_steps_before_it_write_however_late_they_are(gpu: GPU) -> None:
    caches = _caches()
    worker, written = _worker(caches, CUDACopies), caches["model.layers.0"]
    gpu.compute.submit(lambda: written[3].fill_(42))
    worker.execute(Orders(stores=(Move(3, 1, 1),)))
    worker._copies._stores._stream.run()
    assert worker.take_word() is None  # the compute stream has not run
    _run(worker, gpu)
    assert (worker._copies._pool[1, : PAGE_BYTES // LAYERS] == 42).all()


def test_a_load_writes_when_the_steps_before_it_have_ended(gpu: GPU) -> None:
    caches = _caches()
    worker, block = _worker(caches, CUDACopies), caches["model.layers.1"][6]
    stored = caches["model.layers.1"][0].clone()
    _answers(worker, gpu, Orders(stores=(Move(0, 1, 1),)))
    gpu.compute.submit(lambda: block.fill_(42))  # of whom the block was before
    worker.execute(Orders(loads={1: (Move(6, 1, 1),)}))
    worker._copies._loads._stream.run()
    _run(worker, gpu)
    assert torch.equal(block, stored)


def test_the_directions_do_not_wait_for_each_other(gpu: GPU) -> None:
    worker = _worker(_caches(), CUDACopies)
    _answers(worker, gpu, Orders(stores=(Move(0, 1, 1),)))
    worker.execute(Orders(stores=(Move(2, 2, 2),), loads={5: (Move(6, 1, 1),)}))
    gpu.compute.run()
    worker._copies._loads._stream.run()
    word = worker.take_word()
    assert (word.stores, word.loads) == ({}, {5: Answer(1)})


def test_host_memory_that_has_changed_fails_the_load_of_its_request_alone(gpu: GPU) -> None:
    worker = _worker(_caches(), CUDACopies)
    _answers(worker, gpu, Orders(stores=(Move(0, 0, 1), Move(1, 1, 2), Move(2, 2, 3))))
    worker._copies._pool[1, PAGE_BYTES - 1] ^= 1
    loads = {1: (Move(4, 0, 1),), 2: (Move(5, 1, 2),), 3: (Move(6, 2, 3),)}
    assert _answers(worker, gpu, Orders(loads=loads))[1] == {1: Answer(1), 2: Answer(1, "checksum"), 3: Answer(1)}


def test_batches_that_take_their_time_come_and_go_through_the_same_entries(gpu: GPU) -> None:
    caches, rng = _caches(), random.Random(0)
    worker = _worker(caches, CUDACopies)
    content: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by slot
    busy: dict[int, tuple[int, int, list[torch.Tensor]]] = {}  # slot and block by tag
    for tag in range(1, 400):
        slots = [slot for slot in range(SLOTS) if slot not in {each[0] for each in busy.values()}]
        blocks = [block for block in range(BLOCKS) if block not in {each[1] for each in busy.values()}]
        if slots:
            slot, block = rng.choice(slots), rng.choice(blocks)
            if slot in content and rng.random() < 0.5:
                held, pages = content[slot]
                worker.execute(Orders(loads={tag: (Move(block, slot, held),)}))
            else:
                content.pop(slot, None)
                for cache in caches.values():
                    cache[block] = torch.randint(-128, 128, cache[block].shape, dtype=torch.int8)
                pages = [cache[block].clone() for cache in caches.values()]
                worker.execute(Orders(stores=(Move(block, slot, tag),)))
            busy[tag] = slot, block, pages
        if rng.random() < 0.4 or not slots:
            _run(worker, gpu)
        word = worker.take_word()
        if word is None:
            continue
        for key, answer in (*word.stores.items(), *word.loads.items()):
            assert answer == Answer(1)
            slot, block, pages = busy.pop(key)
            assert all(torch.equal(c[block], page) for c, page in zip(caches.values(), pages, strict=True))
            if key in word.stores:
                content[slot] = key, pages


def test_one_slot_may_be_loaded_into_every_block_at_once(gpu: GPU) -> None:
    caches = _caches()
    worker = _worker(caches, CUDACopies)
    _answers(worker, gpu, Orders(stores=(Move(3, 2, 1),)))
    loads = {block: (Move(block, 2, 1),) for block in range(BLOCKS)}
    assert _answers(worker, gpu, Orders(loads=loads))[1] == dict.fromkeys(range(BLOCKS), Answer(1))
    assert all((cache == cache[3]).all() for cache in caches.values())


def test_a_driver_that_reports_an_error_fails_the_batches_that_it_had(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(_caches(), CUDACopies)
    _answers(worker, gpu, Orders(stores=(Move(0, 0, 1),)))

    def fails(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    worker.execute(Orders(stores=(Move(1, 1, 2),), loads={3: (Move(4, 0, 1),)}))
    worker.execute(Orders(stores=(Move(2, 2, 4),)))
    monkeypatch.setattr(Event, "query", fails)
    word = worker.take_word()
    assert word.stores == {2: Answer(1, "copy_failed"), 4: Answer(1, "copy_failed")}
    assert word.loads == {3: Answer(1, "copy_failed")}


def test_a_launch_that_fails_is_answered_at_once_and_takes_no_entry(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = _worker(_caches(), CUDACopies)
    stores = worker._copies._stores
    kernel = stores._copy

    def fails(*args: object) -> None:
        raise RuntimeError("launch of block_copy_store failed")

    for tag in range(1, 2 * SLOTS):
        stores._copy = fails
        worker.execute(Orders(stores=(Move(0, 0, tag),)))
        assert worker.take_word().stores == {tag: Answer(1, "copy_failed")}
    stores._copy = kernel
    moves = tuple(Move(slot, slot, 100 + slot) for slot in range(SLOTS))
    assert _answers(worker, gpu, Orders(stores=moves))[0] == {100 + slot: Answer(1) for slot in range(SLOTS)}


@pytest.mark.parametrize("move", [Move(BLOCKS, 0, 1), Move(-1, 0, 1), Move(0, SLOTS, 1), Move(0, -1, 1)], ids=str)
def test_a_block_or_a_slot_that_is_not_there_is_not_copied(gpu: GPU, move: Move) -> None:
    worker = _worker(_caches(), CUDACopies)
    assert _answers(worker, gpu, Orders(stores=(move,)))[0] == {1: Answer(1, "copy_failed")}


@pytest.mark.parametrize("spare", [0, 1, PAGE_BYTES - 1])
def test_what_is_pinned_is_whole_pages_and_two_small_rings(gpu: GPU, spare: int) -> None:
    worker = _worker(_caches(), CUDACopies, SLOTS * PAGE_BYTES + spare)
    assert gpu.pinned == [SLOTS * PAGE_BYTES, ring_bytes(SLOTS, LAYERS), ring_bytes(BLOCKS, LAYERS)]
    assert worker._copies.nbytes == SLOTS * PAGE_BYTES


def test_a_pool_that_cannot_be_pinned_is_said_of_every_order(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(size: int, device: torch.device) -> None:
        raise RuntimeError("cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")

    monkeypatch.setattr(offload_copies_cuda, "pinned", fails)
    worker = _worker(_caches(), CUDACopies)
    worker.execute(Orders(stores=(Move(0, 0, 1),), loads={1: (Move(0, 0, 1),)}))
    word = worker.take_word()
    assert (word.stores, word.loads) == ({1: Answer(1, "no_host_pool")}, {1: Answer(1, "no_host_pool")})


def test_a_cache_whose_blocks_lie_in_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strides \(64, 1, 4\) cannot be offloaded: each block, by the first"):
        pages_of(torch.zeros(3, 16, 4).transpose(1, 2))
