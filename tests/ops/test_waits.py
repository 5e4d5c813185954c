"""What kernels before this one may still be writing is read after `griddepcontrol.wait`, in the machine code too.

The compiler may move a load through a `const __restrict__` pointer up, past the wait: it has been told that nobody
writes there while the kernel runs. No CPU test and few GPU runs show that, so the instructions are looked at (sm_90a).
Weights (ops/w4a8) are read before the wait on purpose and next to what is not, so those kernels are not in this.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton import knobs

from kvcompile.ops import nvrtc
from kvcompile.ops.act_quant import cuda as act_quant
from kvcompile.ops.kv8 import cuda as kv8
from kvcompile.ops.kv8.decode_shape import SHARED_BYTES, decode_shape
from kvcompile.ops.prune import cuda as prune
from kvcompile.ops.prune import cuda_move, cuda_select
from kvcompile.ops.rotary import cuda as rotary

CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?) ;", re.MULTILINE)
LOAD = re.compile(r"\b(LDG|LDGSTS|LD|UBLKCP)\b")
# Kernels that read something before a wait on purpose: loads in front of the first, and of the last. kv8_combine reads
# the plan of a step, for which kv8_decode has waited. Those with `settled` pass over their first wait: rotary reads a
# position and two angles then, kv8_decode, whose warps part, the plan, lengths, tables and tiles.
EARLY_LOADS = {"kv8_combine": (5, 5), "kv8_decode": (0, None), "rotary": (0, 3)}


def _decode(kv_heads: int, ratio: int, head_size: int = 128) -> tuple[Path, dict[str, int | str]]:
    shape = decode_shape(head_size, kv_heads, ratio, SHARED_BYTES[9, 0])
    assert shape
    return kv8.DECODE, kv8.decode_defines(head_size, kv_heads, ratio, 0, 16, shape)


SOURCES: list[tuple[Path, dict[str, int | str]]] = [
    _decode(8, 4),
    _decode(1, 16),
    _decode(3, 3, 64),
    *((source, {"D": 128, "DTYPE": 0, "BS": 16}) for source in (kv8.STORE, kv8.COMBINE, kv8.DEQUANTISE)),
    (kv8.PLAN, {"BS": 16}),
    *((act_quant.SOURCE, {"DTYPE": 0, "VECTORS": vectors, "ALIGNED": 1}) for vectors in (0, 1)),
    *((source, {"D": 128, "ROWS": 128, "DTYPE": 0, "REACH": 3}) for source in (prune.ANCHOR, prune.SCORE)),
    *((source, {"D": 128, "ROWS": 128, "DTYPE": 0}) for source in (prune.STATS, prune.MEANS, prune.KEY_DIFFERENCE)),
    *((source, {"D": 128}) for source in (prune.ANCHOR_SUM, cuda_move.COMPACT, cuda_move.COPY)),
    *((rotary.SOURCE, {"D": 128, "DTYPE": 0, "WIDTH": width}) for width in (8, 1)),
    (prune.FINISH, {}),
    (cuda_select.SELECT, {}),
]


def _kernels(cubin: bytes, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each kernel's name and instructions."""
    (folder / "cubin").write_bytes(cubin)
    run = subprocess.run([knobs.nvidia.nvdisasm.path, folder / "cubin"], capture_output=True, text=True, check=True)
    for section in re.split(r"^\s*\.section\s+\.text\.", run.stdout, flags=re.MULTILINE)[1:]:
        yield section[: section.index(",")], CODE.findall(section)


@pytest.mark.parametrize(("source", "defines"), SOURCES, ids=lambda x: x.stem if isinstance(x, Path) else "")
def test_nothing_is_read_before_the_wait(source: Path, defines: dict[str, int | str], tmp_path: Path) -> None:
    found = dict(_kernels(nvrtc.compile(source, "sm_90a", defines).cubin, tmp_path))
    assert found
    for name, code in found.items():
        waits = [at for at, instruction in enumerate(code) if "ACQBULK" in instruction]
        for wait, allowed in zip((waits[0], waits[-1]), EARLY_LOADS.get(name, (0, 0)), strict=True):
            early = [instruction for instruction in code[:wait] if LOAD.search(instruction)]
            assert allowed in (len(early), None), f"{name}: {early}"
        assert any(LOAD.search(instruction) for instruction in code[waits[0] :]), (
            f"{name} reads nothing: are loads found?"
        )
