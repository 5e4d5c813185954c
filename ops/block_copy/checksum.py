"""The checksum of a row that block_copy.cu computes beside each copy, on a CPU.

    sum over i of mixed(w_i + (i + 1) * STEP)  mod 2^64        w_i: the row's words of 64 bits, little-endian

`mixed` is the finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection. So a row of which one word has changed,
in whatever bits, never has the checksum that it had. Rows that differ in several words, have words or layers swapped,
or are another page altogether, have the same one by chance alone, 1 in 2^64. It guards against mistakes and faults of
memory, not against somebody who looks for two rows with one checksum: those can be computed.
"""

from __future__ import annotations

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def checksums(rows: np.ndarray, first: int = 0) -> np.ndarray:
    """uint64 [...] of uint64 [..., words], whose first word is word `first` of its row: parts of a row add up."""
    places = np.arange(first + 1, first + 1 + rows.shape[-1], dtype=np.uint64)
    words = rows + places * STEP
    for shift, factor in _ROUNDS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return (words ^ (words >> np.uint64(31))).sum(axis=-1, dtype=np.uint64)
