"""The checksum of a row: what it tells apart."""

from __future__ import annotations

import numpy as np

from kvcompile.ops.block_copy.checksum import checksums

WORDS = 64


def _row() -> np.ndarray:
    return np.random.default_rng(0).integers(2**64, size=WORDS, dtype=np.uint64)


def test_every_bit_counts() -> None:
    row = _row()
    changed = np.repeat(row[None], WORDS * 64, axis=0)
    bits = np.arange(WORDS * 64)
    changed[bits, bits // 64] ^= np.uint64(1) << (bits % 64).astype(np.uint64)
    assert len({checksums(row).item(), *checksums(changed).tolist()}) == 1 + len(changed)


def test_words_that_change_places_count_and_so_does_where_zeros_are() -> None:
    row = _row()
    swapped = [np.roll(row, by) for by in range(WORDS)]
    assert len(set(checksums(np.stack(swapped)).tolist())) == WORDS
    # The top bits of two words, which odd factors alone would not tell from one another.
    ones = np.zeros((WORDS, WORDS), dtype=np.uint64)
    ones[np.arange(WORDS), np.arange(WORDS)] = np.uint64(1) << np.uint64(63)
    assert len(set(checksums(ones).tolist())) == WORDS
    assert checksums(np.zeros(WORDS, dtype=np.uint64)) != checksums(np.zeros(WORDS + 1, dtype=np.uint64))


def test_parts_of_a_row_add_up() -> None:
    row = _row()
    parts = checksums(row[:10]).item() + checksums(row[10:], first=10).item()
    assert parts % 2**64 == checksums(row)


def test_it_is_the_sum_of_splitmix64() -> None:
    """The generator seeded with 0 adds the step and mixes: its first values are known."""
    known = 0xE220A8397B1DCDAF + 0x6E789E6AA1B965F4 + 0x06C45D188009454F
    assert checksums(np.zeros(3, dtype=np.uint64)) == known % 2**64
