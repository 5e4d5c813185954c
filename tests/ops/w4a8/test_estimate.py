"""The choice where nothing was measured: of the right size, and made of kernels that compile well."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.w4a8 import cuda, estimate, fused
from kvcompile.ops.w4a8.limits import Limits
from tests.ops.w4a8.gpus import A100, GPUS, H200, L4, LLAMA_8B, RTX_3090, RTX_5090

ARCHITECTURES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (12, 0): "sm_120"}


def test_the_estimated_crossover_is_of_the_size_that_was_measured_on_the_h200() -> None:
    for rows, columns, _ in LLAMA_8B:
        assert 64 < estimate.crossover(H200, rows, columns) <= 512


def test_a_memory_that_makes_the_rebuilt_weight_cheap_is_made_use_of() -> None:
    for limits in GPUS:
        fast = limits._replace(bandwidth=4 * limits.bandwidth)
        assert estimate.crossover(fast, 28672, 4096) < estimate.crossover(limits, 28672, 4096)


def test_a_gpu_that_names_no_clocks_still_gets_an_answer() -> None:
    unnamed = L4._replace(bandwidth=0.0, clock=0.0)
    assert estimate.choose(unnamed, 1, 4096, 4096, 32) is not None
    assert estimate.choose(unnamed, 4096, 4096, 4096, 32) is None


def test_the_nominal_rate_is_that_of_the_data_sheet() -> None:
    # At the clock that the vendor quotes it for: 624 and 1979 TOPS.
    assert estimate.int8_rate(A100) == pytest.approx(624e12, rel=0.01)
    assert estimate.int8_rate(H200._replace(clock=1.83e9)) == pytest.approx(1979e12, rel=0.01)


@pytest.mark.parametrize("limits", [A100, RTX_3090, L4, H200, RTX_5090], ids=lambda gpu: gpu.name)
def test_what_the_estimate_chooses_compiles_without_spills(limits: Limits) -> None:
    kernels = set()
    for rows, columns, groups in (*LLAMA_8B[:1], (576, 576, 9), (64, 1024, 1), (256, 1024, 2)):
        for tokens in (1, 16, 32, 64):
            tiling = estimate.choose(limits, tokens, rows, columns, groups)
            kernels.add((cuda.SOURCES[tiling.wgmma], tuple(fused.defines(tiling, tokens, columns, groups, 0).items())))
    for source, defines in kernels:
        binary = nvrtc.compile(source, ARCHITECTURES[limits.capability], dict(defines))
        for resources in binary.resources.values():
            assert resources.spill_store_bytes == 0, (source.name, defines)
