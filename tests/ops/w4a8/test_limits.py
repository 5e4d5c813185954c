"""What is read of a GPU, from properties and a driver that stand for it."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from kvcompile.ops.w4a8 import cuda
from tests.ops.w4a8.gpus import H200

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cuda.limits.cache_clear()
    yield
    cuda.limits.cache_clear()


def _properties(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, multiprocessors: int, shared: int) -> None:
    found = types.SimpleNamespace(
        name="NVIDIA H200",
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        shared_memory_per_multiprocessor=shared,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
        clock_rate=1_980_000,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_the_driver_says_how_many_clusters_are_resident_alone_on_their_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _properties(monkeypatch, 9, 0, 132, 233472)

    def resident_clusters(cluster: int, block: int, shared_bytes: int) -> int:
        # More than half of a multiprocessor's, and no more than one block may have.
        assert 233472 // 2 < shared_bytes <= 232448 and block == 256
        return {2: 66, 4: 30, 8: 15}[cluster]

    kernel = types.SimpleNamespace(resident_clusters=resident_clusters)
    monkeypatch.setattr(cuda, "_rebuild_kernel", lambda device: kernel)
    found = cuda.limits(GPU)
    assert found._replace(bandwidth=0) == H200._replace(bandwidth=0)
    # 2 x 3.201 GHz x 6144 bits: the 4.9 TB/s of the data sheet.
    assert found.bandwidth == pytest.approx(4.917e12, rel=1e-3)


def test_below_compute_capability_9_there_are_blocks_alone_and_the_driver_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _properties(monkeypatch, 8, 6, 82, 102400)
    monkeypatch.setattr(cuda, "_rebuild_kernel", lambda device: pytest.fail("asked"))
    found = cuda.limits(GPU)
    assert found.clusters == (0, 82)
    assert (found.capability, found.multiprocessors, found.shared_bytes) == ((8, 6), 82, 102400)
