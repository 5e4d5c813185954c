"""What the tests of the int8 cache on a GPU share: the operator's output of a batch, and what it is compared with."""

from __future__ import annotations

import torch

from kvcompile.ops.kv8 import kv8_decode, plan_decode, reference
from tests.ops.kv8.batches import Batch

# Of outputs of about 1: rounding of the result, and of probabilities to fp16.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def decode(batch: Batch, *, planned: bool = False) -> torch.Tensor:
    """The operator's output on the GPU, from a buffer full of NaN, on the CPU."""
    query, cache, table, lengths = (x.cuda() for x in (batch.query, batch.cache, batch.block_table, batch.seq_lens))
    output = torch.full_like(query, float("nan"))
    plan = plan_decode(table, lengths, cache.shape[2]) if planned else None
    kv8_decode(query, cache, table, lengths, output, batch.scale, plan)
    return output.cpu()


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().amax().clamp_min(1.0)
    error = ((output.double() - expected).abs() / scale).max().item()
    assert error <= TOLERANCE[output.dtype], f"error {error:.2e}"


def assert_like_reference(batch: Batch, output: torch.Tensor) -> None:
    assert_close(output, reference.attention(batch.query, batch.cache, *batch.tensors, batch.scale))


def all_slots(batch: Batch) -> torch.Tensor:
    """int64: where the cache has the tokens of `batch.key`, row after row."""
    block_size, found = batch.cache.shape[2], []
    for row, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length)
        found.append(batch.block_table[row, positions // block_size].long() * block_size + positions % block_size)
    return torch.cat(found)
