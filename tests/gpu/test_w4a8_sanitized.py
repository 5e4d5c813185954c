"""The W4A8 kernels under compute-sanitizer, where it is installed: no bad access, no race in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
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


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_has_nothing_to_say(tool: str) -> None:
    # A kernel's parameters are read from the driver until it has no more, which memcheck would report; other errors of
    # the driver raise.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9", sys.executable, "-c", SCRIPT]
    # Caching would hide a read past the end of a tensor in the same cached block.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\b0 (errors|hazards)\b", done.stdout)
