"""The W4A8 kernels compile for every architecture, in every kind of variant and as models need them, without spills."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from kvcompile.ops import nvrtc
from kvcompile.ops.w4a8 import cuda, fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.limits import Limits
from tests.gpu.test_w4a8_on_gpu import TILINGS
from tests.ops.w4a8.gpus import GPUS, LLAMA_8B

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
# (columns, groups): two tiles a step and a step a group; several steps a group; one tile a step; a group per channel.
KINDS = ((4096, 32), (4096, 16), (576, 9), (4304, 1))


def _runs_on(arch: str, tiling: Tiling) -> bool:
    return arch == "sm_90a" or not tiling.wgmma and (tiling.split == 1 or arch == "sm_120")


def _assert_sound(source: Path, name: str, arch: str, defines: dict[str, int]) -> None:
    binary = nvrtc.compile(source, arch, defines)
    used = binary.resources[name]
    spills = used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes
    assert spills == (0, 0, 0), f"{name} for {arch} with {defines}: {used}"
    # ptxas says so when it cannot keep wgmma asynchronous.
    assert "wgmma" not in binary.log.replace("fused_wgmma", "")


def _variants(tiling: Tiling) -> Iterator[dict[str, int]]:
    """The macros of the variants that differ in kind: by tokens, by the steps of a group, by the output."""
    sizes = sorted({fused.token_tiles(n, wgmma=tiling.wgmma) * 8 for n in (8, 16, 32, 64, 128)})
    one_group = [n for n in sizes if fused.fits_registers(tiling, n)]
    several = [n for n in sizes if fused.fits_registers(tiling, n, one_group=False)]
    for tokens in one_group:
        yield fused.defines(tiling, tokens, *KINDS[0], 0)
    for tokens in several:
        yield fused.defines(tiling, tokens, *KINDS[1], 0)
    for kind in KINDS[2:]:
        yield fused.defines(tiling, several[0], *kind, 0)
    for out in (1, 2, 3):
        yield fused.defines(tiling, one_group[-1], *KINDS[0], out)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_kind_of_tiling_compiles_without_spills(arch: str, tiling: Tiling) -> None:
    if not _runs_on(arch, tiling):
        # Not a gap: such a tiling is never planned there (test_plan.py).
        assert tiling.split > 1 or tiling.wgmma
        return
    source = cuda.SOURCES[tiling.wgmma]
    for defines in _variants(tiling):
        _assert_sound(source, f"w4a8_{source.stem}", arch, defines)


@pytest.mark.parametrize("limits", GPUS, ids=lambda gpu: gpu.name)
def test_what_is_chosen_for_a_models_layers_compiles_without_spills(limits: Limits) -> None:
    """By the shipped table where there is one, else by the estimate."""
    major, minor = limits.capability
    arch = f"sm_{major}{minor}" + "a" * (limits.capability == (9, 0))
    variants = set()
    for rows, columns, _ in LLAMA_8B:
        for group in (64, 128):
            for tokens in (1, *table.MEASURED_TOKENS):
                if tiling := table.choose(limits, tokens, rows, columns, columns // group):
                    defines = fused.defines(tiling, tokens, columns, columns // group, 0)
                    variants.add((cuda.SOURCES[tiling.wgmma], tuple(sorted(defines.items()))))
    assert variants
    for source, defines in variants:
        _assert_sound(source, f"w4a8_{source.stem}", arch, dict(defines))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_rebuild_kernel_compiles_without_spills(arch: str) -> None:
    _assert_sound(cuda.REBUILD, "w4a8_rebuild", arch, {"TILES": cuda.REBUILD_TILES})


def test_wgmma_multiplies_and_weights_arrive_16_bytes_at_a_time(tmp_path: Path) -> None:
    """What makes the kernels fast is there: a compiler that turned to something else would not fail any other test."""
    for tiling, product in ((Tiling(4, 16, 4, 2, 1), "IGMMA"), (Tiling(1, 8, 4, 1, 2), "IMMA.16832.S8.S8")):
        defines = fused.defines(tiling, 16, 4096, 32, 0)
        name = tmp_path / "kernel.cubin"
        name.write_bytes(nvrtc.compile(cuda.SOURCES[tiling.wgmma], "sm_90a", defines).cubin)
        shown = subprocess.run([DISASSEMBLER, "-c", name], capture_output=True, text=True, check=True).stdout
        assert product in shown and re.search(r"LDGSTS\.E\.BYPASS\S*\.128", shown)
        assert "LDL" not in shown and "STL" not in shown
        # ptxas 13.0 has been seen to put a descriptor into an odd register, which is an illegal instruction.
        assert not re.search(r"desc\[UR\d*[13579]\]", shown)
