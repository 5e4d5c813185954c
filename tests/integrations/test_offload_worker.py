"""The worker's half of offload over real memory: whole pages, both ways, and nothing that is not what it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvcompile.integrations.vllm.offload_copies import CPUCopies, Ended
from kvcompile.integrations.vllm.offload_messages import Answer, Move, Orders, Word
from kvcompile.integrations.vllm.offload_worker import OffloadWorker
from kvcompile.ops.kv8 import kv_cache_shape

BLOCKS, SLOTS = 8, 5
SHAPE = kv_cache_shape(BLOCKS, 16, 2, 64)
PAGE_BYTES = 2 * SHAPE[1] * SHAPE[2] * SHAPE[3] * SHAPE[4]  # of two layers


def _caches(pitch_pages: int = 1, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two layers of int8 pages that lie so many pages apart."""
    made = {}
    for name in ("model.layers.0", "model.layers.1"):
        page = torch.randint(-128, 128, (BLOCKS * pitch_pages, *SHAPE[1:]), dtype=torch.int8, device=device)
        made[name] = page[::pitch_pages]
    return made


def _worker(caches: dict[str, torch.Tensor], make=CPUCopies, pool_bytes: int = SLOTS * PAGE_BYTES) -> OffloadWorker:
    worker = OffloadWorker(pool_bytes, PAGE_BYTES, make)
    worker.register(caches)
    return worker


def _store(worker: OffloadWorker, *moves: Move) -> Word | None:
    worker.execute(Orders(stores=moves))
    return worker.take_word()


def _load(worker: OffloadWorker, *moves: Move) -> Answer:
    worker.execute(Orders(loads={7: moves}))
    return worker.take_word().loads[7]


@pytest.mark.parametrize("pitch_pages", [1, 3])
def test_pages_come_back_into_other_blocks_byte_for_byte(pitch_pages: int) -> None:
    caches = _caches(pitch_pages)
    worker = _worker(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    assert _store(worker, Move(3, 0, 11), Move(5, 4, 12)).stores == {11: Answer(1), 12: Answer(1)}
    for cache in caches.values():
        cache[[3, 5]] = 0
    assert _load(worker, Move(6, 4, 12), Move(1, 0, 11)) == Answer(1)
    for name, cache in caches.items():
        assert torch.equal(cache[[1, 6]], before[name][[3, 5]])
        others = [0, 2, 4, 7]
        assert torch.equal(cache[others], before[name][others])


def test_stores_of_a_step_see_what_was_there_before_its_loads() -> None:
    caches = _caches()
    worker = _worker(caches)
    _store(worker, Move(2, 0, 1))
    before = caches["model.layers.0"][3].clone()
    worker.execute(Orders(stores=(Move(3, 1, 2),), loads={1: (Move(3, 0, 1),)}))
    assert worker.take_word() == Word({2: Answer(1)}, {1: Answer(1)})
    assert _load(worker, Move(4, 1, 2)) == Answer(1)
    assert torch.equal(caches["model.layers.0"][4], before)


def test_a_step_without_copies_is_not_spoken_of() -> None:
    worker = _worker(_caches())
    worker.execute(Orders())
    assert worker.take_word() is None


@pytest.mark.parametrize("move", [Move(1, 2, 99), Move(1, 3, 1)], ids=["another tag", "a slot that holds nothing"])
def test_a_slot_that_does_not_hold_what_is_wanted_is_not_loaded(move: Move) -> None:
    caches = _caches()
    worker = _worker(caches)
    _store(worker, Move(0, 2, 5))
    before = caches["model.layers.0"].clone()
    assert _load(worker, Move(7, 2, 5), move) == Answer(1, "stale")
    assert torch.equal(caches["model.layers.0"], before)


def test_a_slot_that_is_written_again_does_not_hold_the_page_before() -> None:
    worker = _worker(_caches())
    _store(worker, Move(0, 2, 5))
    _store(worker, Move(1, 2, 6))
    assert _load(worker, Move(7, 2, 5)) == Answer(1, "stale")
    assert _load(worker, Move(7, 2, 6)) == Answer(1)


def test_host_memory_that_has_changed_is_not_loaded_and_only_its_request_suffers() -> None:
    worker = _worker(_caches())
    _store(worker, Move(0, 0, 1), Move(1, 1, 2))
    worker._copies._pool[1, 17] ^= 1
    worker.execute(Orders(loads={1: (Move(4, 0, 1),), 2: (Move(5, 1, 2),)}))
    assert worker.take_word().loads == {1: Answer(1), 2: Answer(1, "checksum")}


def test_a_copy_that_fails_is_said_of_every_page_of_it() -> None:
    class Failing(CPUCopies):
        def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
            raise RuntimeError("injected")

    worker = _worker(_caches(), Failing)
    word = _store(worker, Move(0, 0, 1), Move(1, 1, 2))
    assert word.stores == {1: Answer(1, "copy_failed"), 2: Answer(1, "copy_failed")}
    assert _load(worker, Move(3, 0, 1)) == Answer(1, "stale")


def test_a_batch_that_ends_badly_leaves_no_page_that_could_be_loaded() -> None:
    class Bad(CPUCopies):
        def ended(self) -> list[Ended]:
            return [ended._replace(why_not="lost on the way") for ended in super().ended()]

    worker = _worker(_caches(), Bad)
    assert _store(worker, Move(0, 0, 1)).stores == {1: Answer(1, "lost on the way")}
    assert _load(worker, Move(3, 0, 1)) == Answer(1, "stale")


def test_a_pool_that_cannot_be_had_is_said_of_every_order() -> None:
    def make(caches: Sequence[torch.Tensor], slots: int) -> CPUCopies:
        raise RuntimeError("not enough memory: you tried to allocate 5 pages")

    worker = _worker(_caches(), make)
    assert _store(worker, Move(0, 0, 1)).stores == {1: Answer(1, "no_host_pool")}
    assert _load(worker, Move(0, 0, 1)) == Answer(1, "no_host_pool")


@pytest.mark.parametrize("spare", [0, 1, PAGE_BYTES - 1])
def test_the_pool_takes_whole_pages_and_never_more_than_it_may(spare: int) -> None:
    worker = _worker(_caches(), pool_bytes=SLOTS * PAGE_BYTES + spare)
    assert worker._copies.nbytes == SLOTS * PAGE_BYTES


def test_a_cache_of_another_page_size_than_the_scheduler_counts_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"has {PAGE_BYTES // 2} bytes, and the scheduler counts {PAGE_BYTES}"):
        _worker({"one layer": _caches()["model.layers.0"]})


def test_a_page_has_been_copied_when_every_rank_has_said_so() -> None:
    ours = Word({1: Answer(1), 2: Answer(1)}, {})
    theirs = Word({1: Answer(1, "copy_failed")}, {3: Answer(1)}).of_rank(1)
    both = Word({1: Answer(0b11, "copy_failed"), 2: Answer(0b01)}, {3: Answer(0b10)})
    assert ours.of_rank(0).aggregate(theirs) == both
