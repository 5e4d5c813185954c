"""`kv8_decode` of a step without prompts: it begins to read pages while the store of the newest tokens still runs."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import kv8_decode, kv8_store, plan_decode, reference
from tests.gpu.kv8_outputs import assert_close, assert_like_reference
from tests.ops.kv8.batches import POISON, Batch, make_batch

pytestmark = pytest.mark.gpu

MODELS = [(32, 8, 128), (8, 1, 128), (9, 3, 80), (64, 32, 64)]
# Rows in one block alone, rows divided between blocks, both, more rows than blocks, rows without tokens in between.
LENGTHS = {
    "one": [700],
    "alone": [40] * 132,
    "divided": [2000, 1500],
    "both": [1, 16, 900, 33, 17, 544, 2, 129, 32],
    "many": [20] * 100 + [3000] + [0, 36] * 50,
    "padded": [0, 300, 0, 0, 17, 65, 0],
    "nothing": [0, 0, 0],
}


class Step:
    """A layer of a decode step on the GPU: `poison` the newest tokens, then `run`: store them and attend to all."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.query, self.cache = batch.query.cuda(), batch.cache.cuda()
        self.table, self.lengths = batch.block_table.cuda(), batch.seq_lens.cuda()
        held, block_size = batch.seq_lens > 0, batch.cache.shape[2]
        newest, ends = batch.seq_lens - 1, batch.seq_lens.cumsum(0) - 1
        pages = batch.block_table[torch.arange(len(held)), newest.clamp_min(0) // block_size].long()
        self.slots = torch.where(held, pages * block_size + newest % block_size, -1).cuda()
        padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (batch.key, batch.value))
        self.key, self.value = (x[ends.clamp_min(0)].cuda() for x in padded)
        self.plan = plan_decode(self.table, self.lengths, block_size)
        self.output = torch.empty_like(self.query)

    def poison(self) -> None:
        block_size, stored = self.cache.shape[2], self.slots[self.slots >= 0]
        self.cache[stored // block_size, :, stored % block_size] = POISON
        self.output.fill_(float("nan"))

    def run(self) -> None:
        kv8_store(self.key, self.value, self.cache, self.slots)
        kv8_decode(
            self.query, self.cache, self.table, self.lengths, self.output, self.batch.scale, self.plan, settled=True
        )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), MODELS)
def test_newest_tokens_that_are_being_stored_are_attended_to(
    heads: int, kv_heads: int, head_size: int, lengths: list[int]
) -> None:
    batch = make_batch([(n - 1, 1) for n in lengths], heads=heads, kv_heads=kv_heads, head_size=head_size)
    step = Step(batch)
    for _ in range(3):
        step.poison()
        step.run()
        output = step.output.cpu()
        assert_like_reference(batch, output)
        assert not output[batch.seq_lens == 0].any()


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_page_that_another_row_fills_in_the_same_step_is_attended_to_as_it_then_is(block_size: int) -> None:
    full = [4 * block_size, 4 * block_size + 1, 8 * block_size, 8 * block_size + 1]
    batch = make_batch([(n - 1, 1) for n in full], heads=32, kv_heads=8, head_size=128, block_size=block_size)
    for row, pages in ((1, 4), (3, 8)):
        batch.block_table[row, :pages] = batch.block_table[row - 1, :pages]
    step = Step(batch)
    for _ in range(10):
        step.poison()
        step.run()
        assert_like_reference(batch, step.output.cpu())


def test_released_pages_are_neither_read_nor_attended_to() -> None:
    rows, released = [(47, 1), (600, 1), (99, 1), (31, 1)], [1, 20, 3, 2]
    batch, held = (make_batch(rows, heads=8, head_size=128) for _ in range(2))
    for row, pages in enumerate(released):
        batch.block_table[row, :pages] = 0
        held.block_table[row] = held.block_table[row].roll(-pages)
        held.seq_lens[row] -= 16 * pages
    batch.seq_lens[3] = 0  # as of a padded row; all pages of its table are released
    step = Step(batch)
    step.poison()
    step.run()
    expected = reference.attention(held.query, held.cache, *held.tensors, held.scale)
    assert_close(step.output.cpu(), expected)
    assert not step.output[3].any()


def test_layers_captured_behind_each_other_replay_right_again_and_again() -> None:
    rows = [(n - 1, 1) for n in LENGTHS["both"]]
    steps = [Step(make_batch(rows, heads=32, kv_heads=8, head_size=128, seed=seed)) for seed in range(8)]
    for step in steps:
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.run()
    for _ in range(3):
        for step in steps:
            step.poison()
        graph.replay()
        for step in steps:
            assert_like_reference(step.batch, step.output.cpu())
