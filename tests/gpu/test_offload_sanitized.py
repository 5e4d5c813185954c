"""The kernels that move pages to host memory under compute-sanitizer, where it is installed: no bad access, no race."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import TOOLS, assert_nothing_to_say, needs_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import random
import torch
from kvcompile.integrations.vllm.offload_copies import pages_of
from tests.gpu.test_offload_copies_on_gpu import BLOCKS, CUDACopies, _layers

layers = _layers()
before = [pages_of(layer).clone() for layer in layers]
rng, copies = random.Random(0), CUDACopies(layers, BLOCKS)
for count in (1, 5, 31, BLOCKS):
    blocks, slots = (rng.sample(range(BLOCKS), count) for _ in range(2))
    copies.start_store(blocks, slots)
    torch.cuda.synchronize()
    for layer in layers:
        pages_of(layer)[blocks] = 0
    copies.start_load(slots, blocks)
    torch.cuda.synchronize()
    stored, loaded = copies.ended()
    assert (stored.why_not, loaded.why_not) == ("", "") and stored.checksums == loaded.checksums
    assert all(torch.equal(pages_of(layer), old) for layer, old in zip(layers, before))
print("done")
"""


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    assert_nothing_to_say(tool, SCRIPT)
