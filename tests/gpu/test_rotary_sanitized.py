"""The rotary embedding kernel under compute-sanitizer, where it is installed: no bad access, no race."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import TOOLS, assert_nothing_to_say, needs_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import torch
from kvcompile.ops.rotary import rotary
from tests.ops.rotary.heads import make_heads

# Vectors and single pairs; a block and several; threads without a head; the last row of the table.
for shape in ((3, 32, 8, 128), (2, 9, 3, 72), (1, 1, 1, 2), (4, 9, 3, 64)):
    given = make_heads(*shape, torch.bfloat16, rows=5)
    given.positions[-1] = 4
    on_gpu = [x.cuda() for x in given]
    for settled in (False, True):
        torch.cuda.synchronize()
        for ours, theirs in zip(rotary(*on_gpu, settled), rotary(*given), strict=True):
            assert torch.equal(ours.cpu(), theirs)
torch.cuda.synchronize()
print("done")
"""


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    assert_nothing_to_say(tool, SCRIPT)
