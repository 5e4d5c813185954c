"""The operator `kvcompile::w4a8_linear`: schema, fake, checks and its Python name.

M tokens, N output channels, K input channels, G groups a row; `layout.py` has the packed weight.
"""

from __future__ import annotations

import torch

from kvcompile.ops.library import register
from kvcompile.ops.w4a8 import cpu, cuda
from kvcompile.ops.w4a8.layout import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, tiles_along
from kvcompile.ops.w4a8.reference import check_group

ALIGNMENT = 16  # bytes that the kernels read at once
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def w4a8_linear(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y[t, n] = x_scale[t] * channel_scales[n] * sum_k x_q[t, k] * w8'[n, k] (+ bias[n]), of shape [M, N].

    x_q: int8 [M, K]. x_scale: fp32 [M]. tiles, group_params: what `pack` returned. channel_scales: fp32 [N]. bias: [N]
    of out_dtype, or None. out_dtype: bf16, fp16 or fp32. All contiguous, on one device.

    On a GPU the weight (tiles, group_params, channel_scales) may be read before the kernel in front of this one on the
    stream has ended: whatever writes it must not be that very kernel, or must have been waited for.

    The sum is exact, in int32; the rest is computed in fp32, in the order float(sum) * x_scale * channel_scales + bias,
    and rounded once. For many tokens on a GPU vLLM's kernel takes the scales in another order: one rounding of
    fp32 apart. Raises ValueError naming the argument that does not fit.
    """
    return torch.ops.kvcompile.w4a8_linear(x_q, x_scale, tiles, group_params, channel_scales, bias, out_dtype)


def _check(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    tiles: torch.Tensor,
    group_params: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"w4a8_linear: out_dtype is {out_dtype}; allowed are {', '.join(map(str, OUT_DTYPES))}")
    if x_q.dim() != 2 or channel_scales.dim() != 1:
        raise ValueError(
            f"w4a8_linear: x_q is {list(x_q.shape)}, channel_scales {list(channel_scales.shape)}; allowed: [M, K], [N]"
        )
    (tokens, columns), rows = x_q.shape, channel_scales.shape[0]
    groups = group_params.shape[1] if group_params.dim() == 3 else 0
    if not groups or columns % groups:
        raise ValueError(
            f"w4a8_linear: group_params is {list(group_params.shape)}; allowed is [N / {TILE_ROWS}, groups, 32] with "
            f"groups that divide the {columns} columns of x_q"
        )
    check_group(columns, columns // groups)
    wanted = {
        "x_q": (x_q, torch.int8, (tokens, columns)),
        "x_scale": (x_scale, torch.float32, (tokens,)),
        "tiles": (
            tiles,
            torch.uint8,
            (tiles_along(rows, TILE_ROWS), tiles_along(columns, TILE_COLUMNS), TILE_BYTES),
        ),
        "group_params": (group_params, torch.uint8, (tiles_along(rows, TILE_ROWS), groups, 2 * TILE_ROWS)),
        "channel_scales": (channel_scales, torch.float32, (rows,)),
    }
    if bias is not None:
        wanted["bias"] = (bias, out_dtype, (rows,))
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"w4a8_linear: {name} is {tensor.dtype} {list(tensor.shape)}; allowed is {dtype} {list(shape)}"
            )
        if tensor.device != x_q.device:
            raise ValueError(f"w4a8_linear: {name} is on {tensor.device}, x_q on {x_q.device}; allowed is one device")
        if not tensor.is_contiguous():
            raise ValueError(f"w4a8_linear: {name} has strides {tensor.stride()}; allowed is a contiguous tensor")


def _fake(x_q, x_scale, tiles, group_params, channel_scales, bias, out_dtype):  # type: ignore[no-untyped-def]
    # Also what runs where one argument alone is on `meta`: an uninitialised result must not come of that.
    _check(x_q, x_scale, tiles, group_params, channel_scales, bias, out_dtype)
    return x_q.new_empty((x_q.shape[0], channel_scales.shape[0]), dtype=out_dtype)


def _cpu(*arguments) -> torch.Tensor:  # type: ignore[no-untyped-def]
    _check(*arguments)
    return cpu.linear(*arguments)


def _cuda(*arguments) -> torch.Tensor:  # type: ignore[no-untyped-def]
    _check(*arguments)
    for name, tensor in zip(("x_q", "x_scale", "tiles", "group_params"), arguments, strict=False):
        if name != "x_scale" and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"w4a8_linear: {name} starts {tensor.data_ptr() % ALIGNMENT} bytes off a multiple of {ALIGNMENT}, as a "
                "view into a larger tensor can; allowed is an aligned one, such as a clone"
            )
    return cuda.linear(*arguments)


register(
    "w4a8_linear(Tensor x_q, Tensor x_scale, Tensor tiles, Tensor group_params, Tensor channel_scales, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    fake=_fake,
    CPU=_cpu,
    CUDA=_cuda,
)
