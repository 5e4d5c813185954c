"""The kernels that move pages compile for every architecture, without spills, two thread blocks to a multiprocessor."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.block_copy import cuda
from tests.ops.kv8.test_decode_shape import SHARED


@pytest.mark.parametrize("arch", SHARED)
def test_the_kernels_that_copy(arch: str) -> None:
    resources = nvrtc.compile(cuda.SOURCE, arch).resources
    assert set(resources) == set(cuda.SIGNATURES)
    for name, used in resources.items():
        assert used[1:] == (0, 0, 0, 0), f"{arch} {name} spills, or has a stack or shared memory: {used}"
        assert 2 * used.registers * cuda.THREADS <= 65536, f"{arch} {name}"
