"""The W4A8 kernels under compute-sanitizer, where it is installed: no bad access, no race in shared memory."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer import TOOLS, assert_nothing_to_say, needs_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import torch
from kvcompile.ops.w4a8 import cuda, rebuild, w4a8_linear
from tests.gpu.test_w4a8_on_gpu import TILINGS, _runs_here
from tests.ops.w4a8.weights import make_activations, make_weight

for rows, columns, group, tokens in ((64, 14336, 128, 1), (257, 576, 64, 17), (33, 4304, 4304, 70)):
    weight = make_weight(rows, columns, group).cuda()
    x_q, x_scale = (each.cuda() for each in make_activations(tokens, columns))
    want = x_q.double() @ rebuild(weight.plain).double().t()
    arguments = x_q, x_scale, *weight.arguments, None
    for tiling in TILINGS:
        if _runs_here(tiling) and cuda.limits(x_q.device).plan(tokens, rows, columns, columns // group, tiling):
            assert torch.equal(cuda.fused_linear(*arguments, torch.int32, tiling).double(), want)
    cuda.rebuild(weight.tiles, weight.group_params, rows, columns)
    w4a8_linear(*arguments, torch.bfloat16)
torch.cuda.synchronize()
print("done")
"""


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    assert_nothing_to_say(tool, SCRIPT)
