"""`prune_select` and `prune_select_layers` on CUDA: one launch of select.cu for all KV heads of up to 16 layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from kvcompile.ops import launch
from kvcompile.ops.prune.checks import MOST_STAGES
from kvcompile.ops.prune.methods import Stage

SELECT = Path(__file__).with_name("select.cu")
LAYERS = 16  # of one launch, whose addresses are parameters of the kernel
SIGNATURES = {"prune_select": "PP" * LAYERS + "iiiiiiiiiiiiiPiPPi"}
THREADS = 1024


def select(scores: torch.Tensor, keep: int, sink: int, window: int, stages: list[Stage]) -> torch.Tensor:
    """int32 [G, keep] as `selection.select`, whose checks the arguments have passed."""
    return select_layers([scores], keep, sink, window, stages)[0]


def select_layers(
    scores: list[torch.Tensor], keep: int, sink: int, window: int, stages: list[Stage]
) -> list[torch.Tensor]:
    """int32 [G, keep] of each layer as `selection.select_layers`, whose checks the arguments have passed."""
    alike: dict[torch.Size, list[int]] = {}
    for layer, of_layer in enumerate(scores):
        alike.setdefault(of_layer.shape, []).append(layer)
    results: dict[int, torch.Tensor] = {}
    for layers in alike.values():
        for begin in range(0, len(layers), LAYERS):
            some = layers[begin : begin + LAYERS]
            keeps = _launch([scores[layer].contiguous() for layer in some], keep, sink, window, stages)
            results |= zip(some, keeps, strict=True)
    return [results[layer] for layer in range(len(scores))]


def _launch(scores: list[torch.Tensor], keep: int, sink: int, window: int, stages: list[Stage]) -> list[torch.Tensor]:
    device, (_, kv_heads, length) = scores[0].device, scores[0].shape
    evictable = length - window - sink
    # Of a stage that there is not, nothing is read; a room of the last one neither.
    first, second, third = (stages + stages[-1:] * 2)[:MOST_STAGES]
    rooms = [int(stage.share * (keep - sink - window)) for stage in (first, second)]
    results = [torch.empty((kv_heads, keep), dtype=torch.int32, device=device) for _ in scores]
    addresses = [x for pair in zip(scores, results, strict=True) for x in pair] + [None, None] * (LAYERS - len(scores))
    heads = len(scores) * kv_heads
    kept_pitch = -(-evictable // 4) * 4
    chunks = max(-(-evictable // stage.chunk) for stage in stages)
    kept = torch.empty(heads * kept_pitch, dtype=torch.uint8, device=device)
    keys, sizes = torch.empty((2, heads * chunks), dtype=torch.int32, device=device)
    _kernel(device)(
        (kv_heads, len(scores), 1),
        THREADS,
        (
            *addresses,
            *(len(stages), length, sink, window, keep),
            *(rooms[0], first.chunk, first.reduce == "sum", rooms[1], second.chunk, second.reduce == "sum"),
            *(third.chunk, third.reduce == "sum"),
            *(kept, kept_pitch, keys, sizes, chunks),
        ),
        programmatic=True,
    )
    return results


@cache
def _kernel(device: torch.device) -> launch.Kernel:
    return launch.kernel(SELECT, "prune_select", device, signature=SIGNATURES["prune_select"])
