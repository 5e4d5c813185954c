"""The kernels of pruning under compute-sanitizer, where it is installed: no bad access, no race."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import TOOLS, assert_nothing_to_say, needs_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import torch
from kvcompile.ops.prune import METHODS, parse_method, prune_compact, prune_copy, prune_score, select
from tests.ops.prune.prompts import make_prompt

# Rows of one chunk and of several, a window in parts, a last word beyond the vector, lengths that end within a tile.
kinds = ((32, 8, 128, 32, 16), (9, 3, 80, 32, 48), (4, 1, 64, 130, 16), (16, 1, 256, 32, 16), (2, 2, 96, 1, 16))
for heads, kv_heads, head_size, window, block_size in kinds:
    prompt = make_prompt(531, heads=heads, kv_heads=kv_heads, head_size=head_size, window=window,
                         block_size=block_size, dtype=torch.bfloat16)
    query, cache, row = prompt.query.cuda(), prompt.cache.cuda(), prompt.row.cuda()
    weight = prompt.output_weight.bfloat16().cuda()
    for name in METHODS:
        method = parse_method(name, window=window)
        scores = prune_score(query, cache, row, 531, prompt.scale, method, weight)
        expected = prompt.score(method)
        assert (scores.cpu() - expected).abs().max() <= 5e-3 * expected.abs().max()
        keep = select(scores, method, 531 - 240)
        assert torch.equal(keep.cpu(), select(scores.cpu(), method, 531 - 240))
        target = torch.zeros_like(cache)
        prune_copy(cache, row, target, row, keep, 240)
    prune_compact([cache] , row, [keep], 531, 240)
torch.cuda.synchronize()
print("done")
"""


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    assert_nothing_to_say(tool, SCRIPT)
