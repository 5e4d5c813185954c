"""The kernels of block_copy.cu on the CPU: every byte of a page and no other, and the checksum of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcompile.ops import launch
from kvcompile.ops.block_copy.checksum import checksums
from kvcompile.ops.block_copy.cuda import THREADS, BlockCopy
from kvcompile.ops.block_copy.ring import Ring, ring_bytes
from tests.ops.block_copy import on_cpu

BLOCKS, SLOTS = 5, 4
# Bytes of a page of each layer: less than a lane's vectors, a whole number of turns, one vector more, layers unlike.
WIDTHS = [(16,), (2048, 2048), (2064, 6528, 48), (4224,) * 9]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "kernel", on_cpu.kernel)


def _layers(widths: tuple[int, ...], apart: int = 0) -> list[torch.Tensor]:
    """Random pages that lie so many bytes apart."""
    return [torch.randint(256, (BLOCKS, width + apart), dtype=torch.uint8)[:, :width] for width in widths]


def _rows_and_ring(layers: list[torch.Tensor]) -> tuple[torch.Tensor, Ring]:
    rows = torch.randint(256, (SLOTS, sum(layer.shape[1] for layer in layers)), dtype=torch.uint8)
    memory = torch.full((ring_bytes(SLOTS, len(layers)),), 255, dtype=torch.uint8)
    return rows, Ring(memory, SLOTS, len(layers))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("apart", [0, 112])
@pytest.mark.parametrize("grid", [1, 3])
def test_pages_come_back_from_other_rows_byte_for_byte(widths: tuple[int, ...], apart: int, grid: int) -> None:
    layers = _layers(widths, apart)
    before = [layer.clone() for layer in layers]
    whole = [layer._base.clone() for layer in layers]
    rows, ring = _rows_and_ring(layers)
    untouched = rows[1].clone()
    copy = BlockCopy(layers, grid)

    copy.store(rows, ring, ring.place([4, 0, 2], [2, 0, 3]), 3)
    ring.keep(3)
    wanted = torch.cat([layer[[4, 0, 2]] for layer in before], 1)
    assert torch.equal(rows[[2, 0, 3]], wanted) and torch.equal(rows[1], untouched)
    sums = ring.give_back(3)
    assert sums == checksums(wanted.numpy().view(np.uint64)).tolist()

    copy.load(rows, ring, ring.place([1, 3], [3, 2]), 2)  # the ring begins anew within the batch
    ring.keep(2)
    assert ring.give_back(2) == [sums[2], sums[0]]
    for layer, base, old in zip(layers, whole, before, strict=True):
        base[[1, 3], : layer.shape[1]] = old[[2, 4]]
        assert torch.equal(layer._base, base)


def test_a_launch_has_no_more_thread_blocks_than_it_has_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    def kernel(*args: object, **kwargs: object) -> object:
        return lambda grid, block, args: grids.append((grid, block))

    monkeypatch.setattr(launch, "kernel", kernel)
    layers = _layers((16,) * 10)
    rows, ring = _rows_and_ring(layers)
    copy = BlockCopy(layers, 2)
    for count in (1, 2, 4):
        copy.store(rows, ring, 0, count)
    assert grids == [((1, 1, 1), THREADS), ((2, 1, 1), THREADS), ((2, 1, 1), THREADS)]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (torch.zeros(2, 24, dtype=torch.uint8), "layer 1 of the cache: bytes of a page: given 24, allowed are mult"),
        (
            torch.zeros(2, 24, dtype=torch.uint8)[:, :16],
            "layer 1 of the cache: bytes from one block to the next: given 24, allowed are multiples of 16",
        ),
        (
            torch.zeros(40, dtype=torch.uint8)[8:].view(2, 16),
            "layer 1 of the cache: address: given [0-9]+, allowed are multiples of 16",
        ),
        (torch.zeros(2, 16, dtype=torch.uint8, device="meta"), "layer 1 of the cache is on meta, and layer 0 on cpu"),
    ],
    ids=["width", "pitch", "address", "device"],
)
def test_a_cache_that_vectors_do_not_fit_is_refused_by_layer(layer: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockCopy([torch.zeros(2, 32, dtype=torch.uint8), layer])
