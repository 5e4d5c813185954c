"""Weights in QServe's layout, written and read one element at a time, as the published kernels define it."""

from __future__ import annotations

import torch

GROUP = 128


def as_the_kernel_reads(
    qweight: torch.Tensor, scales: torch.Tensor | None = None, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """The B operand of each mma.m16n8k32 of QServe's kernels, gathered into [N, K].

    Follows `share_to_reg_one_stage_B` (w4a8_per_group/gemm_cuda.cu): thread t of a warp loads 16 bytes of a tile of 32
    by 32 as four words; four bits of each byte of a word are the k values of one register. Registers 2j and 2j + 1 hold
    channel 8j + t / 4, k = 4 (t % 4) + byte, and k + 16. A word of nibbles is multiplied by the channel's scale in one
    32-bit product, and the zero added byte by byte. Without scales: the nibbles.
    """
    rows, columns = qweight.shape[0], qweight.shape[1] * 2
    data = qweight.contiguous().view(torch.uint8).flatten().tolist()
    registers = [(0, 0), (2, 0), (1, 0), (3, 0), (0, 4), (2, 4), (1, 4), (3, 4)]  # word, shift of ptr[0..7]
    out = torch.zeros(rows, columns, dtype=torch.int64)
    for tile_row in range(rows // 32):
        for tile_column in range(columns // 32):
            for thread in range(32):
                start = ((tile_row * (columns // 32) + tile_column) * 32 + thread) * 16
                words = [int.from_bytes(bytes(data[start + 4 * w : start + 4 * w + 4]), "little") for w in range(4)]
                for register, (word, shift) in enumerate(registers):
                    value = (words[word] >> shift) & 0x0F0F0F0F
                    if scales is not None:
                        group = tile_column * 32 // (columns // len(scales))
                        place = tile_row * 32 + thread // 4 * 4 + register // 2
                        value = value * (int(scales[group, place]) & 0xFF) & 0xFFFFFFFF
                        add = int(zeros[group, place]) & 0xFF
                    for byte in range(4):
                        number = value >> 8 * byte & 0xFF
                        if scales is not None:
                            number = (number + add) & 0xFF
                            number -= 256 if number > 127 else 0
                        n = tile_row * 32 + register // 2 * 8 + thread // 4
                        k = tile_column * 32 + register % 2 * 16 + thread % 4 * 4 + byte
                        out[n, k] = number
    return out


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """qweight of 4-bit values [N, K], one element at a time."""
    rows, columns = codes.shape
    data = bytearray(rows * columns // 2)
    for n in range(rows):
        for k in range(columns):
            a, b, c = n % 32 // 16, n % 16 // 8, n % 8
            d, e, f = k % 32 // 16, k % 16 // 4, k % 4
            tile = (n // 32) * (columns // 32) + k // 32
            data[tile * 512 + c * 64 + e * 16 + d * 8 + b * 4 + f] |= int(codes[n, k]) << 4 * a
    return torch.frombuffer(data, dtype=torch.int8).view(rows, columns // 2)


def in_kernel_order(values: torch.Tensor) -> torch.Tensor:
    """int8 [G, N] of whole numbers [N, G], modulo 256, one element at a time."""
    rows, groups = values.shape
    out = torch.zeros(groups, rows, dtype=torch.uint8)
    for n in range(rows):
        for group in range(groups):
            out[group, n // 32 * 32 + n % 8 * 4 + n % 32 // 8] = int(values[n, group]) % 256
    return out.view(torch.int8)


def grouped(
    rows: int = 64, columns: int = 256, seed: int = 3
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tensors, codes, s2, z) of a random weight of groups of 128 that fills the int8 range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns // GROUP)
    s2 = torch.randint(1, 17, shape, generator=generator)
    z = torch.randint(0, 16, shape, generator=generator)
    codes = torch.randint(0, 16, (*shape, GROUP), generator=generator)
    lowest, highest = z - 128 // s2, z + 127 // s2
    codes = torch.minimum(torch.maximum(codes, lowest[..., None]), highest[..., None]).clamp(0, 15).flatten(1)
    tensors = {
        "qweight": interleaved(codes),
        "s1_scales": (torch.rand(rows, generator=generator) / 100 + 0.001).half(),
        "s2_scales": in_kernel_order(s2),
        "s2_zeros": in_kernel_order(-z * s2),
    }
    return tensors, codes, s2, z


def per_channel(rows: int = 32, columns: int = 96) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """(tensors, codes, z) of a random weight with one scale and zero per row."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    z = torch.arange(rows) % 16
    s1 = (torch.rand(rows, generator=generator) / 100 + 0.001).half()
    return {"qweight": interleaved(codes), "s1_scales": s1, "s1_szeros": z.half() * s1}, codes, z
