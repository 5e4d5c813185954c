"""The operator `kvcompile::rotary`: schema, fake, checks and its Python name.

T tokens, H query heads, G KV heads, d head size, P positions of the table. With x a head of a token at position p,
c = cos_sin_cache[p, : d/2], s = cos_sin_cache[p, d/2 :], and x1 and x2 the halves of x (Su et al., RoFormer,
arXiv:2104.09864, with the halves of a head paired instead of neighbours, as GPT-NeoX has them):

    out = round([x1 * c - x2 * s | x2 * c + x1 * s])

Products and sums are fp32, c and s of the dtype that the table has, and the result is rounded once, to the dtype of x.
That is what Inductor makes of vLLM's `RotaryEmbedding.forward_native` in a compiled graph. Products of two bf16, or of
two fp16, are exact in fp32, so it makes no difference whether a product and the sum are one instruction. Run eagerly,
forward_native rounds each product to the dtype of x, too, as does whoever sets Inductor's `emulate_precision_casts`.
"""

from __future__ import annotations

import torch

from kvcompile.ops.act_quant.checks import check_rows, fail
from kvcompile.ops.library import register
from kvcompile.ops.rotary import cpu, cuda

_OP = "rotary"


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    settled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query, key), each head turned by the angles of its token's position; new and contiguous, of the same shapes.

    query: [T, H * d], key: [T, G * d] of one dtype: bf16 or fp16, on a CPU also fp32. Rows may be any distance apart
        (views of a fused qkv tensor), elements of a row are neighbours. T may be 0.
    positions: int64 [T], each from 0 to P - 1; on CUDA that is not checked.
    cos_sin_cache: [P, d] of the dtype of query, contiguous, d even: cosines, then sines. All of a head is turned.
    settled: the kernel before this on the stream writes neither positions nor cos_sin_cache, and what wrote them has
        ended when that one lets this one start (see decode.cu of ops/kv8, which has the same condition). On CUDA they
        are then read while that kernel, as a rule the product that query and key come from, still runs.

    Raises ValueError naming the argument that does not fit.
    """
    return torch.ops.kvcompile.rotary(query, key, positions, cos_sin_cache, settled)


def _rotary_cpu(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, settled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(query, key, positions, cos_sin_cache)
    try:
        return cpu.rotary(query, key, positions, cos_sin_cache)
    except IndexError:
        given = f"{int(positions.min())} to {int(positions.max())}"
        fail(_OP, "positions", given, f"0 to {cos_sin_cache.shape[0] - 1}, the rows of cos_sin_cache")


def _rotary_cuda(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, settled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(query, key, positions, cos_sin_cache)
    return cuda.rotary(query, key, positions, cos_sin_cache, settled)


def _rotary_fake(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, settled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_kinds(query, key, positions, cos_sin_cache)
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _check(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    _check_kinds(query, key, positions, cos_sin_cache)
    if cos_sin_cache.dim() != 2:
        fail(_OP, "cos_sin_cache", f"{cos_sin_cache.dim()} dimensions", "2: [positions, head size]")
    head_size = cos_sin_cache.shape[1]
    if head_size < 2 or head_size % 2:
        fail(_OP, "cos_sin_cache", f"{head_size} columns", "an even number of 2 or more: cosines, then sines")
    if not cos_sin_cache.is_contiguous():
        fail(_OP, "cos_sin_cache", f"strides {cos_sin_cache.stride()}", "a contiguous tensor")
    for name, x in (("query", query), ("key", key)):
        check_rows(_OP, name, x, multiple=head_size)
    if key.shape[0] != query.shape[0]:
        fail(_OP, "key", f"{key.shape[0]} tokens", f"the {query.shape[0]} of query")
    if positions.shape != query.shape[:1]:
        fail(_OP, "positions", f"shape {tuple(positions.shape)}", f"one for each token of query: ({query.shape[0]},)")
    if positions.stride(0) != 1 and positions.shape[0] > 1:
        fail(_OP, "positions", f"stride {positions.stride(0)}", "stride 1")


def _check_kinds(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Dtypes and devices. Needs no sizes: usable while tracing."""
    for name, x in (("key", key), ("cos_sin_cache", cos_sin_cache)):
        if x.dtype != query.dtype:
            fail(_OP, name, x.dtype, f"the dtype of query: {query.dtype}")
    if positions.dtype != torch.int64:
        fail(_OP, "positions", positions.dtype, "torch.int64")
    for name, x in (("key", key), ("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        if x.device != query.device:
            fail(_OP, name, x.device, f"the device of query: {query.device}")


register(
    "rotary(Tensor query, Tensor key, Tensor positions, Tensor cos_sin_cache, bool settled=False) -> (Tensor, Tensor)",
    fake=_rotary_fake,
    CPU=_rotary_cpu,
    CUDA=_rotary_cuda,
)
