"""Every variant of rotary.cu that a launch can ask for compiles, without spills, and its threads cover a token."""

from __future__ import annotations

import pytest

from kvcompile.ops import nvrtc
from kvcompile.ops.rotary.cuda import DTYPES, MAX_THREADS, SIGNATURES, SOURCE, WIDTH, split

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
HEAD_SIZES = (2, 6, 64, 72, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("aligned", [True, False])
def test_the_threads_of_a_token_cover_its_heads_with_less_than_a_warp_to_spare_in_each_block(
    head_size: int, aligned: bool
) -> None:
    for heads in range(2, 200):
        width, blocks, threads = split(head_size, heads, aligned)
        needed = heads * head_size // 2 // width
        assert width == (WIDTH if aligned and head_size % (2 * WIDTH) == 0 else 1)
        assert threads % 32 == 0 and 32 <= threads <= MAX_THREADS
        assert needed <= blocks * threads < needed + 32 * blocks


def test_a_layer_of_llama_3_8b_takes_two_blocks_a_token_with_no_thread_to_spare() -> None:
    assert split(128, 32 + 8, True) == (8, 2, 160)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spills(arch: str) -> None:
    for head_size in HEAD_SIZES if arch == "sm_90a" else (80, 128):
        for width in {split(head_size, 40, aligned).width for aligned in (True, False)}:
            for dtype in DTYPES.values():
                defines = {"D": head_size, "DTYPE": dtype, "WIDTH": width}
                resources = nvrtc.compile(SOURCE, arch, defines).resources
                assert set(resources) == set(SIGNATURES)
                used = resources["rotary"]
                spills = used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes
                assert spills == (0, 0, 0), f"{arch} with {defines}"
                assert used.registers * MAX_THREADS <= 65536
