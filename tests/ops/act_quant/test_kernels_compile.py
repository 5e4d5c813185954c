"""Every variant of act_quant.cu that a launch can ask for compiles for every architecture, without spills."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.act_quant.cuda import DTYPES, ELEMENTS, MAX_THREADS, SIGNATURES, SOURCE, WIDE_THREADS, plan

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
WIDTHS = (*range(1, 2000), *range(2000, 70000, 97), 4096, 5120, 8192, 11008, 14336, 28672, 32768, 65536)
SPLITS = [(width, aligned, few) for width in WIDTHS for aligned in (True, False) for few in (True, False)]


def _variants() -> list[tuple[int, bool]]:
    return sorted({(plan(width, aligned, few).vectors, aligned) for width, aligned, few in SPLITS})


def test_a_plan_covers_its_row_with_whole_warps_that_the_kernel_was_compiled_for() -> None:
    for split in SPLITS:
        vectors, threads = plan(*split)
        assert threads % 32 == 0 and 32 <= threads <= MAX_THREADS.get(vectors, WIDE_THREADS)
        assert vectors == 0 or vectors * threads * ELEMENTS >= split[0], split


def test_rows_of_models_stay_in_registers_and_few_rows_get_more_threads_than_many() -> None:
    for width in (576, 1536, 4096, 5120, 8192, 11008, 14336, 28672):
        assert plan(width, True, True).vectors > 0
        assert plan(width, True, True).threads >= plan(width, True, False).threads
    assert plan(4096, True, True) == (1, 512)
    assert plan(4096, True, False) == (2, 256)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spills(arch: str) -> None:
    variants = _variants()
    assert len(variants) == 7
    for vectors, aligned in variants:
        for dtype in DTYPES.values():
            defines = {"DTYPE": dtype, "VECTORS": vectors, "ALIGNED": int(aligned)}
            resources = nvrtc.compile(SOURCE, arch, defines).resources
            assert set(resources) == set(SIGNATURES)
            for name, used in resources.items():
                spills = used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes
                assert spills == (0, 0, 0), f"{name} for {arch} with {defines}"
                assert used.registers * MAX_THREADS.get(vectors, WIDE_THREADS) <= 65536
