"""The operators `kvcompile::kv8_decode` and `kvcompile::kv8_dequantise`: schemas, fakes, checks, their Python names.

R requests (rows), H query heads, G KV heads with H a multiple of G, d head size; `layout.py` has the cache. On CUDA the
floating-point tensors are bf16 or fp16, the cache's blocks begin at multiples of 16 bytes, and nothing waits for the
device: contents of tensors are not checked.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8 import cpu_decode, cuda, layout
from kvcompile.ops.library import register


def kv8_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
    settled: bool = False,
) -> None:
    """Attention of one new token per row over the int8 cache, the token's own key and value included, to `output`.

    query, output: [R, H, d] of one dtype; heads of a row packed, rows of query anywhere, output contiguous on CUDA.
    kv_cache: int8 (num_blocks, 2, block_size, G, d + 4); `kv8_store` has written the new tokens already.
    block_table: int32 [R, columns]; column c of a row holds positions [c * block_size, (c + 1) * block_size). Leading
        columns of block 0, the null block, are released: their positions are not attended to. Columns past the row's
        length are not read.
    seq_lens: int32 [R]: positions of the row, new token and released ones included. A row of length 0, or of released
        positions alone, gives zeros.
    scale: factor on the scores, above 0, usually d ** -0.5.
    plan: what `plan_decode` returned for these very block_table and seq_lens, or None.
    settled: the kernel before this on the stream, kv8_store for one, writes of the cache nothing but what lies in the
        last two blocks of a row, and neither block_table, seq_lens nor the plan, which is to be given: on a GPU the
        rest is read while that kernel still runs. Not so where rows may share blocks (a prefix cache).

    Products in fp16 with fp32 sums, the softmax in fp32 (decode.cu); fp32 throughout on a CPU.

    Raises ValueError naming the argument that does not fit.
    """
    torch.ops.kvcompile.kv8_decode(query, kv_cache, block_table, seq_lens, output, scale, plan, settled)


def plan_decode(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    """The part of `kv8_decode` that is the same for every layer of a step, to be computed once and passed as `plan`.

    On CUDA: int32 [R + 1] and [R], where each row's tiles of 16 tokens begin and its released pages; see plan.cu. The
    result on a CPU is opaque. Valid for the contents of the two tensors at the time of the call.
    """
    layout.check_rows("plan_decode", block_table, seq_lens)
    layout.check_block_size("plan_decode", block_size)
    return (cuda if seq_lens.is_cuda else cpu_decode).plan(block_table, seq_lens, block_size)


def kv8_dequantise(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write a span of each row's positions, dequantised, into `keys` and `values`.

    kv_cache, block_table: as for `kv8_decode`.
    starts: int32 [R + 1], from 0, not decreasing, at most W; begins: int32 [R]. Positions begins[r] and on of row r go
        to tokens starts[r] to starts[r + 1].
    keys, values: [W, G, d] of one dtype, contiguous. Each element is data * scale in fp32, rounded once.

    For flash attention, which multiplies values that it masks by 0: where a key or a value of a token is not finite,
    its key is NaN and its value 0, and the values of the 256 tokens from starts[R] on, or up to W, are zeros. What
    else lies there is left as it is.

    Raises ValueError naming the argument that does not fit.
    """
    torch.ops.kvcompile.kv8_dequantise(kv_cache, block_table, starts, begins, keys, values)


def _check_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None,
    settled: bool,
) -> None:
    layout.check_decode("kv8_decode", query, kv_cache, block_table, seq_lens, output)
    layout.check_scale("kv8_decode", scale)
    if settled and plan is None:
        layout.fail("kv8_decode", "settled", "True without a plan", "True with what plan_decode returned")


def _decode_cpu(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
    settled: bool = False,
) -> None:
    _check_decode(query, kv_cache, block_table, seq_lens, output, scale, plan, settled)
    plan = cpu_decode.plan(block_table, seq_lens, kv_cache.shape[2]) if plan is None else plan
    cpu_decode.decode(query, kv_cache, output, scale, plan)


def _decode_cuda(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
    settled: bool = False,
) -> None:
    _check_decode(query, kv_cache, block_table, seq_lens, output, scale, plan, settled)
    plan = cuda.plan(block_table, seq_lens, kv_cache.shape[2]) if plan is None else plan
    cuda.decode(query, kv_cache, block_table, seq_lens, output, scale, plan, settled)


def _decode_fake(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor] | None = None,
    settled: bool = False,
) -> None:
    tensors = {"query": query, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    layout.check_one_device("kv8_decode", **tensors, output=output)


def _dequantise(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    layout.check_dequantise("kv8_dequantise", kv_cache, block_table, starts, begins, keys, values)
    (cuda if keys.is_cuda else cpu_decode).dequantise(kv_cache, block_table, starts, begins, keys, values)


def _dequantise_fake(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    tensors = {"kv_cache": kv_cache, "block_table": block_table, "starts": starts, "begins": begins}
    layout.check_one_device("kv8_dequantise", **tensors, keys=keys, values=values)


register(
    "kv8_decode(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor(a!) output, float scale, "
    "Tensor[]? plan=None, bool settled=False) -> ()",
    fake=_decode_fake,
    CPU=_decode_cpu,
    CUDA=_decode_cuda,
)
register(
    "kv8_dequantise(Tensor kv_cache, Tensor block_table, Tensor starts, Tensor begins, Tensor(a!) keys, "
    "Tensor(b!) values) -> ()",
    fake=_dequantise_fake,
    CPU=_dequantise,
    CUDA=_dequantise,
)
