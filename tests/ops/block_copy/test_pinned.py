"""Pinned memory: what is asked of the driver, a recording one here. On a GPU: test_offload_copies_on_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from kvcompile.ops.block_copy import pinned as module
from kvcompile.ops.block_copy.pinned import pinned

GPU = torch.device("cuda", 0)


class Driver:
    """Stands for libcuda: memory of this process."""

    def __init__(self) -> None:
        self.held: dict[int, ctypes.Array] = {}

    @contextlib.contextmanager
    def loading(self, index: int) -> Iterator[int]:
        yield 0

    def pointer(self, name: str, size: int, flags: int) -> int:
        assert (name, flags) == ("cuMemHostAlloc", 3)
        memory = (ctypes.c_uint8 * size)()
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cuMemFreeHost(self, address: int) -> int:
        del self.held[address]
        return 0

    def check(self, result: int, what: str) -> None:
        assert result == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(module, "Driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_memory_of_that_size_is_freed_with_the_last_tensor_over_it(driver: Driver) -> None:
    memory = pinned(96, GPU)
    (held,) = driver.held.values()
    assert (memory.dtype, memory.shape, ctypes.sizeof(held)) == (torch.uint8, (96,), 96)
    row = memory.view(3, 32)[1]
    row.fill_(7)
    assert bytes(held) == bytes(32) + bytes([7]) * 32 + bytes(32)
    del memory
    gc.collect()
    assert driver.held
    del row
    gc.collect()
    assert not driver.held


def test_more_than_the_host_has_is_refused_before_the_driver_tries(driver: Driver) -> None:
    with pytest.raises(
        RuntimeError, match=r"1125899906842624 bytes of host memory are to be pinned, and \d+ are avail"
    ):
        pinned(1 << 50, GPU)
    assert not driver.held
