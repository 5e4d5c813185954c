"""The kernels of the int8 cache under compute-sanitizer, where it is installed: no bad access, no race."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import TOOLS, assert_nothing_to_say, needs_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import torch
from kvcompile.ops.kv8 import kv8_decode, kv8_dequantise, kv8_store, plan_decode, reference
from tests.ops.kv8.batches import make_batch

# A head a warp and several warps a head, copies of a token and of a tile, a last word beyond the vector.
for heads, kv_heads, head_size, block_size in ((32, 8, 128, 16), (8, 1, 128, 16), (9, 3, 80, 32), (64, 32, 64, 16)):
    rows = [(0, 1), (699, 1), (-1, 1), (16, 1), (31, 1)]
    batch = make_batch(rows, heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    query, cache, table, lengths = (x.cuda() for x in (batch.query, batch.cache, batch.block_table, batch.seq_lens))
    output = torch.empty_like(query)
    kv8_decode(query, cache, table, lengths, output, batch.scale)
    expected = reference.attention(batch.query, batch.cache, *batch.tensors, batch.scale)
    assert (output.cpu().double() - expected).abs().max() < 0.1
    plan, again = plan_decode(table, lengths, block_size), torch.empty_like(query)
    torch.cuda.synchronize()
    kv8_decode(query, cache, table, lengths, again, batch.scale, plan, settled=True)
    assert torch.equal(again, output)
    key = torch.randn(5, kv_heads, head_size, device="cuda").bfloat16()
    kv8_store(key, key, cache, torch.tensor([3, -1, 20, 0, 31], device="cuda"))
    starts = torch.tensor([0, 1, 40, 40, 45, 60], dtype=torch.int32, device="cuda")
    begins = torch.tensor([0, 100, 0, 3, 1], dtype=torch.int32, device="cuda")
    keys = torch.empty(70, kv_heads, head_size, dtype=torch.bfloat16, device="cuda")
    kv8_dequantise(cache, table, starts, begins, keys, torch.empty_like(keys))
torch.cuda.synchronize()
print("done")
"""


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    assert_nothing_to_say(tool, SCRIPT)
