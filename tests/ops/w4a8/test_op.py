"""`w4a8_linear` on the CPU: values against float64, and arguments that do not fit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvcompile.ops.w4a8 import cpu as cpu_module
from kvcompile.ops.w4a8 import cuda as cuda_module
from kvcompile.ops.w4a8 import quantize, rebuild, w4a8_linear
from kvcompile.ops.w4a8.layout import pack
from tests.ops.w4a8.weights import make_activations, make_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = (0, 1, 2, 3, 15, 17, 33, 255, 257)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(33, 576, 64), (100, 256, 128), (17, 4304, 4304), (1, 64, 64)])
def test_sums_are_exact(tokens: int, rows: int, columns: int, group: int) -> None:
    weight = make_weight(rows, columns, group)
    x_q, _ = make_activations(tokens, columns)
    sums = cpu_module.accumulate(x_q, weight.tiles, weight.group_params, rows)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.double(), x_q.double() @ rebuild(weight.plain).double().t())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_the_rounded_product_of_float64(dtype: torch.dtype, with_bias: bool) -> None:
    weight = make_weight(70, 512, 128)
    x_q, x_scale = make_activations(9, 512)
    bias = torch.randn(70).to(dtype) if with_bias else None
    y = w4a8_linear(x_q, x_scale, *weight.arguments, bias, dtype)
    wide = x_q.double() @ rebuild(weight.plain).double().t()
    wide = wide * x_scale.double()[:, None] * weight.plain.channel_scales.double()
    wide = wide if bias is None else wide + bias.double()
    assert y.dtype == dtype
    # Roundings in fp32, then one to the output's dtype.
    step = torch.finfo(dtype).eps
    assert ((y.double() - wide).abs() <= wide.abs() * step + 1e-6 * wide.abs().max()).all()


def test_greatest_sums_do_not_wrap() -> None:
    """K = 65536 of -127 * -120 each: half of int32's range in one sum."""
    weight = torch.full((2, 65536), -1.0)
    weight[1] = 1.0
    plain = quantize(weight, 65536)
    x_q = torch.full((1, 65536), -127, dtype=torch.int8)
    sums = cpu_module.accumulate(x_q, *pack(plain), 2)
    assert sums.tolist() == [[127 * 120 * 65536, -127 * 120 * 65536]]


def test_a_changed_weight_is_rebuilt_and_a_dead_one_let_go() -> None:
    weight = make_weight(16, 128, 64)
    x_q, _ = make_activations(3, 128)
    before = cpu_module.accumulate(x_q, weight.tiles, weight.group_params, 16)
    other = make_weight(16, 128, 64, seed=5)
    weight.tiles.data.copy_(other.tiles)  # as vLLM reloads weights: no version changes
    weight.group_params.data.copy_(other.group_params)
    after = cpu_module.accumulate(x_q, weight.tiles, weight.group_params, 16)
    assert not torch.equal(before, after)
    assert torch.equal(after, cpu_module.accumulate(x_q, other.tiles, other.group_params, 16))
    for order in (weight.tiles.flip(0, 1), weight.tiles.unflatten(2, (32, 16)).flip(2).flatten(2)):
        weight.tiles.data.copy_(order.clone())  # the same bytes in another order
        moved = cpu_module.accumulate(x_q, weight.tiles, weight.group_params, 16)
        assert torch.equal(moved, cpu_module.accumulate(x_q, weight.tiles.clone(), weight.group_params, 16))
        assert not torch.equal(moved, after)
        after = moved
    alive = weakref.ref(cpu_module._REBUILT[weight.tiles][1])
    del weight
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "dtype", "taken"),
    [
        ((9, 0), 4096, 4096, torch.bfloat16, True),
        ((8, 0), 4096, 4096, torch.float16, True),
        ((8, 9), 4096, 4096, torch.bfloat16, True),
        # Registered there too, and refused by the operator itself.
        ((10, 0), 4096, 4096, torch.bfloat16, False),
        ((12, 0), 4096, 4096, torch.bfloat16, False),
        ((7, 5), 4096, 4096, torch.float16, False),
        ((9, 0), 4096, 4096, torch.float32, False),
        ((9, 0), 4097, 4096, torch.bfloat16, False),
        ((9, 0), 4096, 4104, torch.bfloat16, False),
    ],
)
def test_vllms_int8_kernel_is_taken_where_it_does_the_product(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    taken: bool,
) -> None:
    monkeypatch.setattr(torch.ops._C, "cutlass_scaled_mm", object(), raising=False)
    assert cuda_module.takes_cutlass(capability, rows, columns, dtype) is taken


def test_the_operator_passes_torchs_own_checks() -> None:
    weight = make_weight(24, 128, 64)
    x_q, x_scale = make_activations(3, 128)
    operator = torch.ops.kvcompile.w4a8_linear.default
    for bias in (None, torch.randn(24).bfloat16()):
        torch.library.opcheck(operator, (x_q, x_scale, *weight.arguments, bias, torch.bfloat16))


def test_it_compiles_with_a_dynamic_number_of_tokens() -> None:
    weight = make_weight(24, 128, 64)

    def layer(x_q: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return w4a8_linear(x_q, x_scale, *weight.arguments, None, torch.float32) * 2

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (1, 3, 8):
        arguments = make_activations(tokens, 128)
        assert torch.equal(compiled(*arguments), layer(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_q": torch.zeros(3, 128)}, "x_q is torch.float32"),
        ({"x_q": torch.zeros(3, 2, 64, dtype=torch.int8)}, r"x_q is \[3, 2, 64\]"),
        ({"x_q": torch.zeros(3, 96, dtype=torch.int8)}, "group size 48 does not fit 96"),
        ({"x_q": torch.zeros(128, 3, dtype=torch.int8).t()}, "x_q has strides"),
        ({"x_scale": torch.zeros(2)}, r"x_scale is torch.float32 \[2\]; allowed is torch.float32 \[3\]"),
        ({"tiles": torch.zeros(2, 2, 512, dtype=torch.int8)}, "tiles is torch.int8"),
        ({"tiles": torch.zeros(1, 2, 512, dtype=torch.uint8)}, r"allowed is torch.uint8 \[2, 2, 512\]"),
        ({"group_params": torch.zeros(2, 3, 32, dtype=torch.uint8)}, "groups that divide the 128 columns"),
        ({"channel_scales": torch.ones(24, dtype=torch.float16)}, "channel_scales is torch.float16"),
        ({"bias": torch.zeros(24)}, "bias is torch.float32"),
        ({"bias": torch.zeros(23, dtype=torch.bfloat16)}, r"bias is torch.bfloat16 \[23\]"),
        ({"x_scale": torch.zeros(3, device="meta")}, "x_scale is on meta"),
        ({"bias": torch.zeros(24, dtype=torch.bfloat16, device="meta")}, "bias is on meta"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(change: dict, message: str) -> None:
    weight = make_weight(24, 128, 64)
    x_q, x_scale = make_activations(3, 128)
    names = ("x_q", "x_scale", "tiles", "group_params", "channel_scales", "bias", "out_dtype")
    arguments = dict(zip(names, (x_q, x_scale, *weight.arguments, None, torch.bfloat16), strict=True))
    with pytest.raises(ValueError, match=message):
        w4a8_linear(**{**arguments, **change})
