"""The kernels of the int8 cache compile for every architecture, without spills and within a block's registers."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.kv8 import cuda
from kvcompile.ops.kv8.decode_shape import decode_shape
from kvcompile.ops.kv8.layout import HEAD_SIZES
from tests.ops.kv8.test_decode_shape import SHARED


def _assert_no_spills(resources: dict[str, nvrtc.Resources], name: str, threads: int, what: str) -> None:
    assert set(resources) == {name}
    used = resources[name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), what
    assert used.registers * threads <= 65536, what


@pytest.mark.parametrize("arch", SHARED)
def test_decode_of_every_head_size(arch: str) -> None:
    for head_size in HEAD_SIZES:
        # A head to a warp, several warps to a head; then other dtypes and pages, odd ratios, many warps.
        kinds = [(8, 4, 0, 16), (1, 16, 0, 16)]
        if head_size == 128 and arch in ("sm_89", "sm_90a"):
            kinds += [(8, 4, 1, 16), (8, 4, 0, 64), (10, 4, 0, 16), (3, 3, 0, 16), (4, 7, 0, 16), (32, 1, 0, 16)]
        for kv_heads, ratio, dtype, block_size in kinds:
            shape = decode_shape(head_size, kv_heads, ratio, SHARED[arch])
            assert shape
            defines = cuda.decode_defines(head_size, kv_heads, ratio, dtype, block_size, shape)
            resources = nvrtc.compile(cuda.DECODE, arch, defines).resources
            _assert_no_spills(resources, "kv8_decode", shape.threads, f"{arch} {defines}")


@pytest.mark.parametrize("arch", SHARED)
def test_the_other_kernels(arch: str) -> None:
    threads = cuda.WARPS * 32
    for head_size, dtype in ((80, 0), (128, 1), (256, 0)):
        defines = {"D": head_size, "DTYPE": dtype, "BS": 16}
        for source in (cuda.STORE, cuda.COMBINE, cuda.DEQUANTISE):
            name = f"kv8_{source.stem}"
            _assert_no_spills(nvrtc.compile(source, arch, defines).resources, name, threads, f"{arch} {source.name}")
    plan = nvrtc.compile(cuda.PLAN, arch, {"BS": 32}).resources
    _assert_no_spills(plan, "kv8_plan", cuda.PLAN_THREADS, f"{arch} plan.cu")
