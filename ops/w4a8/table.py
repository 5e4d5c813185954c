"""Which tiling of the fused kernel, or the rebuilt weight, is fastest for a product: from measurements, by table.

Two files per kind of GPU, of the same form, the first winning entry by entry: the user's, written by `kvcompile bench
w4a8 --tune` into `tables` beside the kernel cache, and the one that comes with this package. Where neither says
anything, `estimate` does.

    {"format": 1, "gpu": "NVIDIA H200", "date": "2026-11-29", "versions": {...}, "shapes": [
        {"rows": 6144, "columns": 4096, "groups": 32, "entries": [
            {"tokens": 1, "tiling": {"row_tiles": 2, "warps": 8, ...}, "us": 5.46},
            {"tokens": 512, "tiling": null, "us": 40.1}]}]}

A tiling of null is the rebuilt weight. "groups" may be left out. An entry holds for more tokens than the one before it
and up to its own number. The estimate takes over below a first entry that is a rebuild, beyond a last one that is not,
and for weights of more than four times the sizes of any measured, or less than a quarter.
"""

from __future__ import annotations

import json
import logging
import math
import re
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.ops import nvrtc
from kvcompile.ops.w4a8 import estimate, fused
from kvcompile.ops.w4a8.fused import WGMMA_ROW_TILES, Tiling
from kvcompile.ops.w4a8.layout import TILE_BYTES
from kvcompile.ops.w4a8.limits import Limits

logger = logging.getLogger(__name__)

FORMAT = 1
SHIPPED = Path(__file__).with_name("tables")
MEASURED_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)
_FEW_TOKENS = 8
_FARTHEST = math.log(4)  # of a shape from one that may stand for it: the ratios of rows and of columns, multiplied
# Of weights on their way in a multiprocessor: fewer do not cover the latency of the memory.
_STAGE_BYTES = (24 << 10, 180 << 10)
_MOST_WARPS = 32


class Entry(NamedTuple):
    """One measurement: up to `tokens` tokens, `tiling` is fastest (None: the rebuilt weight), in `us` microseconds."""

    tokens: int
    tiling: Tiling | None
    us: float


class Shape(NamedTuple):
    """The size of a weight: output channels, input channels, and groups of a row (None: any)."""

    rows: int
    columns: int
    groups: int | None


@lru_cache(maxsize=1 << 16)
def choose(limits: Limits, tokens: int, rows: int, columns: int, groups: int) -> Tiling | None:
    """How to multiply `tokens` rows by a weight: a tiling that fits the GPU, or None for the rebuilt weight.

    A shape that was not measured is taken for the nearest that was, by the logarithm of its sizes.
    """
    entry = _measured(_shapes(limits.name), tokens, rows, columns, groups)
    if entry is not None:
        if entry.tiling is None:
            return None
        if limits.plan(tokens, rows, columns, groups, entry.tiling):
            return entry.tiling
    return estimate.choose(limits, tokens, rows, columns, groups)


def kernels(limits: Limits, rows: int, columns: int, groups: int) -> set[tuple[Tiling, int]]:
    """All kernels that `choose` takes for a weight, whatever the number of tokens: tiling, and tiles of tokens in it.

    Every number is asked: how many tokens there are decides what fits the shared memory, not only how they tile.
    """
    found = set()
    for tokens in range(1, 2 * MEASURED_TOKENS[-1] + 1):
        if tiling := choose(limits, tokens, rows, columns, groups):
            found.add((tiling, fused.token_tiles(tokens, wgmma=tiling.wgmma)))
    return found


def candidates(limits: Limits, tokens: int) -> list[Tiling]:
    """The tilings that are worth measuring on a GPU for that many tokens. Some may not fit a shape."""
    if tokens <= _FEW_TOKENS:
        cuts = product((1, 2), (4, 8, 12, 16), (3, 4, 5, 8), (1, 2), (1, 2, 3))
    else:
        # Activations take the shared memory that more stages or blocks would need; dividing them is what helps.
        cuts = chain(
            product((1, 2), (4, 8, 12, 16), (3, 4, 6), (1, 2, 4), (1, 2)),
            product((WGMMA_ROW_TILES,), (8, 12, 16), (2, 3, 4, 6), (1, 2, 4, 8), (1, 2)),
        )
    return [tiling for tiling in (Tiling(*cut) for cut in cuts) if limits.has(tiling) and _promises(tiling, tokens)]


def _promises(tiling: Tiling, tokens: int) -> bool:
    low, high = _STAGE_BYTES
    # A warp of wgmma's brings one tile of the unit, one of mma.sync's brings all of them.
    tiles = 1 if tiling.wgmma else tiling.row_tiles
    stages = tiling.blocks * tiling.warps * tiling.stages * tiles * 2 * TILE_BYTES
    few_enough = tiling.warps * tiling.blocks <= _MOST_WARPS and fused.fits_registers(tiling, tokens)
    return few_enough and low <= stages <= high


def user_path(gpu: str) -> Path:
    """Where the user's own table of a GPU, by its name, is kept. Raises RuntimeError for a `~` that has no meaning."""
    return nvrtc.cache_dir().with_name("tables") / f"{slug(gpu)}.json"


def slug(gpu: str) -> str:
    """A GPU's name as that of a file: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def parse(text: str) -> dict[Shape, tuple[Entry, ...]]:
    """The shapes of a table with their entries by growing tokens. Raises ValueError saying what is wrong."""
    try:
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(f"format is {content.get('format')!r}; this version reads {FORMAT}")
        shapes = {}
        for shape in content["shapes"]:
            key = Shape(shape["rows"], shape["columns"], shape.get("groups"))
            _check_counts(*key[:2], *(() if key.groups is None else (key.groups,)))
            shapes[key] = _entries(shape["entries"])
        return shapes
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a table of W4A8 tilings ({type(error).__name__}: {error})") from error


def _entries(listed: list[dict[str, Any]]) -> tuple[Entry, ...]:
    entries = []
    for entry in listed:
        tiling = None if entry["tiling"] is None else Tiling(**entry["tiling"])
        _check_counts(entry["tokens"], *(tiling or ()))
        if tiling is not None:
            fused.check_tiling(tiling)
        entries.append(Entry(entry["tokens"], tiling, float(entry["us"])))
    if not entries:
        raise ValueError("a shape has no entries")
    return tuple(sorted(entries, key=lambda entry: entry.tokens))


def _check_counts(*counts: Any) -> None:
    for count in counts:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{count!r} stands where a whole number above 0 belongs")


@lru_cache(maxsize=64)
def _shapes(gpu: str) -> dict[Shape, tuple[Entry, ...]]:
    """All that was measured for a GPU."""
    shipped = SHIPPED / f"{slug(gpu)}.json"
    shapes = parse(shipped.read_text()) if shipped.is_file() else {}
    for shape, entries in _user_shapes(gpu).items():
        merged = {entry.tokens: entry for entry in (*shapes.get(shape, ()), *entries)}
        shapes[shape] = tuple(merged[tokens] for tokens in sorted(merged))
    return shapes


def _user_shapes(gpu: str) -> dict[Shape, tuple[Entry, ...]]:
    """What the user's table has; nothing, after a warning, if it cannot be used."""
    path: Path | str = "the user's table of W4A8 tilings"
    try:
        path = user_path(gpu)
        return parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning(
            "%s is ignored (%s): measure it again with `kvcompile bench w4a8 --tune`, or remove it", path, error
        )
        return {}


def _measured(
    shapes: dict[Shape, tuple[Entry, ...]], tokens: int, rows: int, columns: int, groups: int
) -> Entry | None:
    """The entry that holds for this product, or None if there is none."""

    def distance(shape: Shape) -> tuple[float, bool]:
        sizes = abs(math.log(shape.rows / rows)) + abs(math.log(shape.columns / columns))
        return sizes, shape.groups not in (None, groups)

    nearest = min(shapes, key=distance, default=None)
    if nearest is None or distance(nearest)[0] > _FARTHEST:
        return None
    first, *_, last = entries = (shapes[nearest][0], *shapes[nearest])
    if first.tiling is None and tokens < first.tokens:
        return None
    beyond = last if last.tiling is None else None
    return next((entry for entry in entries if tokens <= entry.tokens), beyond)
