"""Which way to take a product where nobody has measured it: a model of bytes and tensor-core operations. Unmeasured.

    fused      per block of tokens (64, 128 with wgmma): max(packed bytes / bandwidth, operations / rate of mma.sync)
    rebuilt    write the int8 weight, then max(int8 bytes / bandwidth, operations / rate of the int8 product)

The shares of the nominal rates that the two reach are round numbers, as the cross-over is only to be of the right size:
`kvcompile bench w4a8 --tune` measures it.
"""

from __future__ import annotations

from functools import lru_cache

from kvcompile.ops.w4a8 import fused
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.limits import Limits

# Dense int8 operations of a multiprocessor in a clock, from the vendor's figures; a multiply-add counts as two.
_INT8_PER_CLOCK = {(8, 0): 4096, (8, 6): 2048, (8, 9): 2048, (9, 0): 8192, (10, 0): 16384, (12, 0): 2048}
_INT8_PER_CLOCK_ELSEWHERE = 2048
_MMA_SYNC_PER_CLOCK = 4096  # the most that mma.sync reaches, also where newer instructions are faster
_SHARE_OF_BANDWIDTH = 0.8
_SHARE_OF_MMA_SYNC = 0.5
_SHARE_OF_INT8 = 0.6
# For a GPU whose driver does not name its clocks.
_USUAL_CLOCK = 1.5e9
_USUAL_BANDWIDTH = 12e9  # of a multiprocessor's share
_EXTRA_LAUNCH_S = 4e-6  # of the second kernel, with its ramp
_MOST_FUSED_TOKENS = 1024

# (up to how many tokens, tilings best first): the first that fits is taken. Few warps fit small multiprocessors.
_SMALL = (Tiling(1, 8, 4, 1, 1), Tiling(1, 8, 3, 1, 1), Tiling(1, 4, 4, 1, 1), Tiling(1, 4, 3, 1, 1))
_PREFERRED = (
    (16, (Tiling(1, 12, 4, 1, 2), Tiling(1, 8, 4, 1, 2), Tiling(1, 8, 3, 1, 2), *_SMALL)),
    (32, (Tiling(4, 16, 3, 2, 1), Tiling(1, 16, 3, 1, 1), *_SMALL)),
    (_MOST_FUSED_TOKENS, (Tiling(4, 16, 2, 2, 1), Tiling(1, 8, 6, 1, 1), *_SMALL)),
)


def choose(limits: Limits, tokens: int, rows: int, columns: int, groups: int) -> Tiling | None:
    """The tiling to take, or None to rebuild the weight. More tokens never turn a rebuild back into a tiling."""
    if tokens >= crossover(limits, rows, columns):
        return None
    return next((t for t in _preferred(tokens) if limits.plan(tokens, rows, columns, groups, t)), None)


@lru_cache(maxsize=4096)
def crossover(limits: Limits, rows: int, columns: int) -> int:
    """The number of tokens from which on the rebuilt weight is estimated to be faster, a multiple of 8."""
    return next(
        (
            tokens
            for tokens in range(8, _MOST_FUSED_TOKENS, 8)
            if _rebuilt_seconds(limits, tokens, rows, columns) < _fused_seconds(limits, tokens, rows, columns)
        ),
        _MOST_FUSED_TOKENS,
    )


def int8_rate(limits: Limits) -> float:
    """Nominal dense int8 operations per second of the GPU at its highest clock."""
    return _INT8_PER_CLOCK.get(limits.capability, _INT8_PER_CLOCK_ELSEWHERE) * _clocks(limits)


def _clocks(limits: Limits) -> float:
    """Clocks per second of all multiprocessors together."""
    return limits.multiprocessors * (limits.clock or _USUAL_CLOCK)


def _bandwidth(limits: Limits) -> float:
    return _SHARE_OF_BANDWIDTH * (limits.bandwidth or limits.multiprocessors * _USUAL_BANDWIDTH)


def _preferred(tokens: int) -> tuple[Tiling, ...]:
    return next(tilings for most, tilings in _PREFERRED if tokens <= most)


def _fused_seconds(limits: Limits, tokens: int, rows: int, columns: int) -> float:
    block_tokens = fused.token_tiles(tokens, wgmma=_preferred(tokens)[0].wgmma) * 8
    rate = min(int8_rate(limits), _MMA_SYNC_PER_CLOCK * _clocks(limits))
    weight = rows * columns / 2 / _bandwidth(limits)
    product = 2 * block_tokens * rows * columns / (_SHARE_OF_MMA_SYNC * rate)
    return -(-tokens // block_tokens) * max(weight, product)


def _rebuilt_seconds(limits: Limits, tokens: int, rows: int, columns: int) -> float:
    byte = 1 / _bandwidth(limits)
    rebuild = 1.5 * rows * columns * byte  # half a byte read and one written for each weight
    product = 2 * tokens * rows * columns / (_SHARE_OF_INT8 * int8_rate(limits))
    return rebuild + max(rows * columns * byte, product) + _EXTRA_LAUNCH_S
