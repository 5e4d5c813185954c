"""`prune_select` on CUDA: one launch of select.cu for all KV heads."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from kvcompile.ops import launch
from kvcompile.ops.prune.checks import MOST_STAGES
from kvcompile.ops.prune.methods import Stage

SELECT = Path(__file__).with_name("select.cu")
SIGNATURES = {"prune_select": "PiiiiiiiiiiiiiPiPPiP"}
THREADS = 1024


def select(scores: torch.Tensor, keep: int, sink: int, window: int, stages: list[Stage]) -> torch.Tensor:
    """int32 [G, keep] as `selection.select`, whose checks the arguments have passed."""
    scores = scores.contiguous()
    _, kv_heads, length = scores.shape
    evictable = length - window - sink
    # Of a stage that there is not, nothing is read; a room of the last one neither.
    first, second, third = (stages + stages[-1:] * 2)[:MOST_STAGES]
    rooms = [int(stage.share * (keep - sink - window)) for stage in (first, second)]
    result = torch.empty((kv_heads, keep), dtype=torch.int32, device=scores.device)
    kept_pitch = -(-evictable // 4) * 4
    chunks = max(-(-evictable // stage.chunk) for stage in stages)
    kept = torch.empty(kv_heads * kept_pitch, dtype=torch.uint8, device=scores.device)
    keys, sizes = torch.empty((2, kv_heads * chunks), dtype=torch.int32, device=scores.device)
    _kernel(scores.device)(
        (kv_heads, 1, 1),
        THREADS,
        (
            *(scores, len(stages), length, sink, window, keep),
            *(rooms[0], first.chunk, first.reduce == "sum", rooms[1], second.chunk, second.reduce == "sum"),
            *(third.chunk, third.reduce == "sum"),
            *(kept, kept_pitch, keys, sizes, chunks, result),
        ),
        programmatic=True,
    )
    return result


@cache
def _kernel(device: torch.device) -> launch.Kernel:
    return launch.kernel(SELECT, "prune_select", device, signature=SIGNATURES["prune_select"])
