"""What the CPU operators compute, against float64 and against vLLM's own norm and activation."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops import act_quant
from tests.ops.act_quant.rows import EPS, OPERATORS, assert_quantises, before_quantisation, make_arguments, make_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (2, 129), (33, 576), (17, 1536), (5, 11008), (1, 65537)])
@pytest.mark.parametrize("op", OPERATORS)
def test_every_shape_is_within_one_step_of_float64_almost_everywhere(
    op: str, tokens: int, width: int, dtype: torch.dtype
) -> None:
    arguments = make_arguments(op, tokens, width, dtype)
    x_q, x_scale, *_ = getattr(act_quant, op)(*arguments)
    assert_quantises(x_q, x_scale, before_quantisation(op, *arguments), exact=op == "quant_per_token")


def test_known_rows_give_known_numbers() -> None:
    x = torch.tensor([[127.0, -127.0, 1.0, -2.0, 0.0], [0.5, 1.5, 2.5, -2.5, 254.0]])
    x_q, x_scale = act_quant.quant_per_token(x)
    # The second row in steps of 2: 0.25, 0.75, 1.25, -1.25.
    assert x_q.tolist() == [[127, -127, 1, -2, 0], [0, 1, 1, -1, 127]]
    assert x_scale.tolist() == [1.0, 2.0]


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0]])
    assert act_quant.quant_per_token(x)[0].tolist() == [[0, 2, 2, 0, -2, -2, 127]]


def test_the_inverse_of_the_scale_is_rounded_once_as_on_a_gpu() -> None:
    # 127 / a rounded once makes this value 3.5, which goes to 4; 127 times a rounded 1 / a would make it 3.4999998.
    x = torch.tensor([[1.9940955638885498, 0.054955389350652695]])
    assert act_quant.quant_per_token(x)[0].tolist() == [[127, 4]]


def test_a_known_norm_gives_known_numbers() -> None:
    # mean of squares 25 / 2, so the norm is x * sqrt(2) / 5 = (0.848..., -1.131...), and 3 / 4 of 127 is 95.25.
    x = torch.tensor([[3.0, -4.0]])
    x_q, x_scale = act_quant.rms_norm_quant(x, torch.ones(2), 1e-12)
    assert x_q.tolist() == [[95, -127]]
    assert x_scale.item() == pytest.approx(4 * 2**0.5 / 5 / 127, rel=1e-6)


def test_a_known_activation_gives_known_numbers() -> None:
    # silu(0) = 0, silu(ln 3) = ln 3 * 3 / 4.
    gate_up = torch.tensor([[0.0, 1.0986123, 1.0986123, 5.0, 1.0, -4.0]])
    x_q, x_scale = act_quant.silu_mul_quant(gate_up)
    assert x_q.tolist() == [[0, 32, -127]]
    assert x_scale.item() == pytest.approx(3 * 1.0986123 / 127, rel=1e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_residual_is_the_sum_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    x, residual, weight, _ = make_arguments("fused_add_rms_norm_quant", 9, 100, dtype)
    before = x.clone(), residual.clone()
    *_, out = act_quant.fused_add_rms_norm_quant(x, residual, weight, EPS)
    assert torch.equal(out, (x.double() + residual.double()).to(dtype))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_the_fused_norm_sees_the_sum_before_it_is_rounded() -> None:
    x, residual, weight, eps = make_arguments("fused_add_rms_norm_quant", 200, 64, torch.bfloat16)
    _, x_scale, out = act_quant.fused_add_rms_norm_quant(x, residual, weight, eps)
    of_sum = before_quantisation("fused_add_rms_norm_quant", x, residual, weight, eps).abs().amax(-1) / 127
    of_rounded = before_quantisation("rms_norm_quant", out, weight, eps).abs().amax(-1) / 127
    assert int(((of_sum - of_rounded).abs() > 1e-3 * of_sum).sum()) > 10, "the two can be told apart"
    torch.testing.assert_close(x_scale.double(), of_sum, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_norms_equal_those_of_vllm_quantised_afterwards(dtype: torch.dtype) -> None:
    from vllm import ir

    x, residual, weight, eps = make_arguments("fused_add_rms_norm_quant", 40, 1536, dtype)
    expected = act_quant.quant_per_token(ir.ops.rms_norm(x, weight, eps))
    for ours, theirs in zip(act_quant.rms_norm_quant(x, weight, eps), expected, strict=True):
        assert torch.equal(ours, theirs)
    normed, total = ir.ops.fused_add_rms_norm(x, residual, weight, eps)
    expected = (*act_quant.quant_per_token(normed), total)
    for ours, theirs in zip(act_quant.fused_add_rms_norm_quant(x, residual, weight, eps), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_activation_equals_that_of_vllm_quantised_afterwards(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    gate_up = make_rows(40, 3072, dtype)
    expected = act_quant.quant_per_token(SiluAndMul.forward_native(gate_up))
    for ours, theirs in zip(act_quant.silu_mul_quant(gate_up), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_rows_of_zeros_give_zeros_and_a_finite_scale(op: str, dtype: torch.dtype) -> None:
    arguments = [torch.zeros_like(a) if isinstance(a, torch.Tensor) else a for a in make_arguments(op, 3, 40, dtype)]
    x_q, x_scale, *_ = getattr(act_quant, op)(*arguments)
    assert not x_q.any()
    assert x_scale.isfinite().all() and (x_scale > 0).all() and (x_scale < 1e-19).all()


def test_denormals_quantise_to_zero_below_the_floor_and_exactly_above() -> None:
    tiny = torch.full((1, 8), 1e-40)
    tiny[0, 0] = -3e-39
    for x in (tiny, tiny.bfloat16()):
        x_q, x_scale = act_quant.quant_per_token(x)
        assert not x_q.any() and x_scale.isfinite().all()
    # The smallest of fp16, 2^-24, in steps of itself.
    x_q, x_scale = act_quant.quant_per_token((torch.tensor([[127.0, -1.0, 2.0, 0.0]]) * 2**-24).half())
    assert x_q.tolist() == [[127, -1, 2, 0]] and x_scale.tolist() == [2**-24]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_outliers_of_60000_keep_their_row_finite(op: str, dtype: torch.dtype) -> None:
    arguments = make_arguments(op, 4, 256, dtype)
    arguments[0][0, 3], arguments[0][1, 5] = 6e4, -6e4
    x_q, x_scale, *_ = getattr(act_quant, op)(*arguments)
    y = before_quantisation(op, *arguments)
    finite = y.isfinite().all(-1)
    assert finite[2:].all() and (finite.all() or op == "silu_mul_quant")
    assert torch.equal(x_scale.isfinite(), finite)
    assert_quantises(x_q[finite], x_scale[finite], y[finite], exact=op == "quant_per_token")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_row_that_is_not_finite_has_a_scale_that_says_so_and_leaves_the_others_alone(
    op: str, dtype: torch.dtype
) -> None:
    arguments = make_arguments(op, 4, 64, dtype)
    expected = getattr(act_quant, op)(*arguments)
    arguments[0][1, 7], arguments[0][3, 9] = float("nan"), float("inf")
    x_q, x_scale, *_ = getattr(act_quant, op)(*arguments)
    assert x_scale[1].isnan() and not x_scale[3].isfinite()
    assert not x_q[1].any() and not x_q[3].any()
    for row in (0, 2):
        assert torch.equal(x_q[row], expected[0][row]) and x_scale[row] == expected[1][row]


def test_infinity_without_a_nan_gives_an_infinite_scale() -> None:
    x = torch.tensor([[1.0, -float("inf"), 3.0], [float("nan"), float("inf"), 0.0]])
    x_q, x_scale = act_quant.quant_per_token(x)
    assert x_scale[0] == float("inf") and x_scale[1].isnan() and not x_q.any()


@pytest.mark.parametrize("op", OPERATORS)
def test_no_tokens_give_empty_results(op: str) -> None:
    x_q, x_scale, *rest = getattr(act_quant, op)(*make_arguments(op, 0, 64, torch.bfloat16))
    assert x_q.shape == (0, 64) and x_scale.shape == (0,)
    assert [out.shape for out in rest] == [(0, 64)] * len(rest)


@pytest.mark.parametrize("op", OPERATORS)
def test_rows_of_a_wider_tensor_give_what_a_copy_of_them_gives(op: str) -> None:
    arguments = make_arguments(op, 6, 48, torch.bfloat16)
    views = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.dim() == 2:
            wide = torch.full((6, argument.shape[1] + 13), float("nan")).bfloat16()
            wide[:, 5 : 5 + argument.shape[1]] = argument
            argument = wide[:, 5 : 5 + argument.shape[1]]
        views.append(argument)
    for ours, theirs in zip(getattr(act_quant, op)(*views), getattr(act_quant, op)(*arguments), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()
