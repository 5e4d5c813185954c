"""The systems that `kvcompile bench w4a8` compares: each gets the same weight and activations in its own form.

`prepare` makes as many copies of the weight as are to be rotated, and returns call(copy, activations) -> y [M, N].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvcompile.ops import act_quant, w4a8
from kvcompile.ops.w4a8 import W4A8Weight, cuda, table

GROUP_SIZE = 128


class Unavailable(Exception):
    """A system cannot be measured here; the message says why."""


class WrongResult(Exception):
    """A system computes something else than the others."""


class Activations(NamedTuple):
    """M tokens: int8 [M, K] with fp32 scales [M], and the same values in bf16."""

    x_q: torch.Tensor
    x_scale: torch.Tensor
    x: torch.Tensor


Call = Callable[[int, Activations], torch.Tensor]


class System(NamedTuple):
    """prepare(weight, copies) -> call. weight_bytes(N, K, G): what a product reads of a weight.

    tolerance: of the error's norm relative to that of the exact result; None if nothing but the last rounding may
    differ. guarded: an error of this system leaves it out, with its reason, where that of another ends the benchmark.
    """

    prepare: Callable[[W4A8Weight, int], Call]
    weight_bytes: Callable[[int, int, int], float]
    tolerance: float | None
    guarded: bool = False


def groups_of(columns: int) -> int:
    """Groups in a row of a weight that `make_weight` makes."""
    return columns // w4a8.legal_group(columns, GROUP_SIZE)


def make_weight(rows: int, columns: int, device: torch.device) -> W4A8Weight:
    """A quantised weight of normal values, the same for every system."""
    generator = torch.Generator(device).manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator, device=device) / columns**0.5
    return w4a8.quantize(weight, w4a8.legal_group(columns, GROUP_SIZE))


def make_activations(tokens: int, columns: int, device: torch.device) -> Activations:
    generator = torch.Generator(device).manual_seed(tokens)
    x_q, x_scale = act_quant.quant_per_token(
        torch.randn(tokens, columns, generator=generator, device=device).bfloat16()
    )
    return Activations(x_q, x_scale, (x_q * x_scale[:, None]).bfloat16())


def packed_bytes(rows: int, columns: int, groups: int) -> float:
    """Of a W4A8 weight: 4 bits a value, scale and zero point of each group."""
    return rows * columns / 2 + 2 * rows * groups


def _prepare_kvcompile(weight: W4A8Weight, copies: int) -> Call:
    packed = w4a8.pack(weight)
    rotated = [tuple(part.clone() for part in packed) for _ in range(copies)]

    def call(copy: int, a: Activations) -> torch.Tensor:
        return w4a8.w4a8_linear(a.x_q, a.x_scale, *rotated[copy], weight.channel_scales, None, torch.bfloat16)

    return call


def _prepare_bf16(weight: W4A8Weight, copies: int) -> Call:
    dense = w4a8.dequantize(weight).bfloat16()
    rotated = [dense.clone() for _ in range(copies)]
    return lambda copy, a: torch.nn.functional.linear(a.x, rotated[copy])


def _prepare_cutlass(weight: W4A8Weight, copies: int) -> Call:
    load_cutlass()
    if weight.out_features % 16 or weight.in_features % 16:
        raise Unavailable("takes multiples of 16 channels alone")
    rebuilt = w4a8.rebuild(weight)
    rotated = [rebuilt.clone() for _ in range(copies)]

    def call(copy: int, a: Activations) -> torch.Tensor:
        y = a.x.new_empty((a.x_q.shape[0], weight.out_features))
        scales = a.x_scale[:, None], weight.channel_scales[None, :]
        torch.ops._C.cutlass_scaled_mm(y, a.x_q, rotated[copy].t(), *scales, None)
        return y

    return call


def load_cutlass() -> None:
    """Have vLLM's CUDA operators registered. Raises Unavailable where it has none."""
    try:
        importlib.import_module("vllm._custom_ops")
    except ImportError as error:
        raise Unavailable(f"vLLM is not installed ({error})") from error
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise Unavailable("vLLM's CUDA extension is not installed")


def _prepare_humming(weight: W4A8Weight, copies: int) -> Call:
    try:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer
    except ImportError as error:
        raise Unavailable(f"humming-kernels is not installed ({error})") from error
    groups = weight.group_scales.shape[1]
    layer = HummingLayer(
        shape_n=weight.out_features,
        shape_k=weight.in_features,
        weight_config={"dtype": "int4", "group_size": weight.group_size if groups > 1 else 0},
        input_config={"dtype": "int8"},
        torch_dtype=torch.bfloat16,
    ).to(weight.qweight.device)
    layer.load_from_unquantized(w4a8.dequantize(weight).bfloat16())  # symmetric 4 bits of its own
    layer.transform()
    names = ("weight", "weight_scale", "zero_point", "weight_scale_2", "locks")
    parts = {name: part for name in names if (part := getattr(layer, name, None)) is not None}
    rotated = [{name: part.detach().clone() for name, part in parts.items()} for _ in range(copies)]
    config = layer.humming_config
    return lambda copy, a: humming_forward(config, inputs=a.x_q, input_scale=a.x_scale[:, None], **rotated[copy])


SYSTEMS = {
    "kvcompile": System(_prepare_kvcompile, packed_bytes, None),
    "cublas-bf16": System(_prepare_bf16, lambda n, k, g: 2.0 * n * k, 0.01),
    "cutlass-int8": System(_prepare_cutlass, lambda n, k, g: 1.0 * n * k, None),
    # It rounds the weight a second time, to 4 bits without a zero point. Its interface is not a stable one.
    "humming-w4a8": System(_prepare_humming, packed_bytes, 0.25, guarded=True),
}


def exact_sums(weight: W4A8Weight, a: Activations) -> torch.Tensor:
    """The int32 sums by a float64 product, in which they are exact."""
    return (a.x_q.double() @ w4a8.rebuild(weight).double().t()).to(torch.int32)


def check(name: str, system: System, call: Call, weight: W4A8Weight, a: Activations) -> None:
    """Raise WrongResult unless the product is right: to one rounding, or in the norm where the system rounds more."""
    some = _ends(a)
    sums = exact_sums(weight, some)
    wanted = sums.float() * some.x_scale[:, None] * weight.channel_scales
    found = _ends_of(call(0, a)).float()
    where = f"{name} at {a.x_q.shape[0]} tokens, {weight.out_features} x {weight.in_features}"
    if system.tolerance is None:
        # One step of bf16 is at most 2^-7 of the value.
        wrong = int(((found - wanted).abs() > wanted.abs() * 2**-7).sum())
        if wrong or not bool(torch.isfinite(found).all()):
            raise WrongResult(f"{where}: {wrong} of {found.numel()} results are off by more than one rounding")
    else:
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= system.tolerance:
            raise WrongResult(f"{where}: off by {error:.3f} of the norm, more than {system.tolerance}")
    if name == "kvcompile":
        _check_sums(where, weight, a, sums)


def _check_sums(where: str, weight: W4A8Weight, a: Activations, sums: torch.Tensor) -> None:
    """The bare sums of the fused kernel, if that is what the table chooses, must be equal in every bit."""
    groups = weight.group_scales.shape[1]
    limits = cuda.limits(a.x_q.device)
    tiling = table.choose(limits, a.x_q.shape[0], weight.out_features, weight.in_features, groups)
    if tiling is not None:
        packed = w4a8.pack(weight)
        found = cuda.fused_linear(a.x_q, a.x_scale, *packed, weight.channel_scales, None, torch.int32, tiling)
        if not torch.equal(_ends_of(found), sums):
            raise WrongResult(f"{where}: sums of {tiling} differ from the exact ones")


_ENDS = 64  # tokens at each end that are checked: all would take longer than what is measured


def _ends_of(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.shape[0] <= 2 * _ENDS else torch.cat((rows[:_ENDS], rows[-_ENDS:]))


def _ends(a: Activations) -> Activations:
    return Activations(*(_ends_of(part) for part in a))
