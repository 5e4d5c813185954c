"""The activation quantisation kernels against the CPU operators, alone and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops import act_quant
from kvcompile.ops.act_quant import cuda
from tests.ops.act_quant.rows import OPERATORS, assert_quantises, before_quantisation, make_arguments

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
# Each a plan of its own: one to four vectors a thread, rows too wide for that, and odd widths moved one by one.
WIDTHS = (1, 7, 8, 576, 577, 1536, 4096, 5120, 9001, 11008, 14336, 32768, 32776, 65536, 70001)


def _on_gpu(arguments: tuple) -> tuple:
    return tuple(each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments)


def _assert_like_cpu(op: str, ours: tuple[torch.Tensor, ...], arguments: tuple) -> None:
    """Equal but for one step in one element of 1000, and but for the rounding of the row's greatest element."""
    x_q, x_scale, *rest = (each.cpu() for each in ours)
    theirs_q, theirs_scale, *theirs_rest = getattr(act_quant, op)(*arguments)
    if op == "quant_per_token":
        assert torch.equal(x_q, theirs_q) and torch.equal(x_scale, theirs_scale)
    torch.testing.assert_close(x_scale, theirs_scale, rtol=2**-7, atol=0)
    off = (x_q.int() - theirs_q.int()).abs()
    # A row whose scale differs is quantised in other steps; `assert_quantises` below judges those.
    off = off[x_scale == theirs_scale]
    assert not off.numel() or (off.max() <= 1 and int(off.sum()) <= max(1, off.numel() / 1000))
    for one, other in zip(rest, theirs_rest, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_few_rows_of_every_width_are_those_of_the_cpu(op: str, width: int, dtype: torch.dtype) -> None:
    arguments = make_arguments(op, 5, width, dtype)
    _assert_like_cpu(op, getattr(act_quant, op)(*_on_gpu(arguments)), arguments)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [96, 1536, 4096, 5120])
@pytest.mark.parametrize("op", OPERATORS)
def test_many_rows_are_those_of_the_cpu_and_of_float64(op: str, width: int, dtype: torch.dtype) -> None:
    arguments = make_arguments(op, 700, width, dtype)
    # At 4096 and 5120 many rows are split in another way than few.
    assert (cuda.plan(width, True, False) != cuda.plan(width, True, True)) is (width > 4000)
    ours = getattr(act_quant, op)(*_on_gpu(arguments))
    _assert_like_cpu(op, ours, arguments)
    y = before_quantisation(op, *arguments)
    assert_quantises(ours[0].cpu(), ours[1].cpu(), y, exact=op == "quant_per_token")


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(("pad", "shift"), [(8, 0), (16, 8), (13, 5), (1, 0), (8, 1)])
def test_rows_of_a_wider_tensor_are_those_of_a_copy(op: str, pad: int, shift: int) -> None:
    arguments = make_arguments(op, 6, 1024, torch.bfloat16)
    views = []
    for each in _on_gpu(arguments):
        if isinstance(each, torch.Tensor) and each.dim() == 2:
            wide = torch.full((6, each.shape[1] + pad), float("nan"), dtype=each.dtype, device="cuda")
            view = wide[:, shift : shift + each.shape[1]]
            view.copy_(each)
            each = view
        views.append(each)
    _assert_like_cpu(op, getattr(act_quant, op)(*views), arguments)


@pytest.mark.parametrize("width", [64, 577, 32776])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_rows_that_are_not_finite_or_zero_or_denormal_are_those_of_the_cpu(
    op: str, dtype: torch.dtype, width: int
) -> None:
    arguments = make_arguments(op, 6, width, dtype)
    rows = arguments[0]
    rows[0, 3], rows[1, 5] = float("nan"), -float("inf")
    rows[2] = 0
    rows[3] = torch.finfo(dtype).smallest_normal / 4
    rows[4, 1], rows[5, 2] = 6e4, -6e4
    if op == "fused_add_rms_norm_quant":
        arguments[1][2:4] = 0
    x_q, x_scale, *_ = (each.cpu() for each in getattr(act_quant, op)(*_on_gpu(arguments)))
    theirs_q, theirs_scale, *_ = getattr(act_quant, op)(*arguments)
    assert torch.equal(x_scale.isnan(), theirs_scale.isnan()) and torch.equal(x_scale.isinf(), theirs_scale.isinf())
    bad = ~theirs_scale.isfinite()
    assert bad[0] and bad[1] and not x_q[bad].any()
    assert not x_q[2].any() and x_scale[2] == theirs_scale[2]
    good = ~bad
    torch.testing.assert_close(x_scale[good], theirs_scale[good], rtol=2**-7, atol=0)
    assert (x_q[good].int() - theirs_q[good].int()).abs().max() <= 1


@pytest.mark.parametrize("op", OPERATORS)
def test_no_tokens_launch_nothing(op: str) -> None:
    x_q, x_scale, *_ = getattr(act_quant, op)(*_on_gpu(make_arguments(op, 0, 64, torch.bfloat16)))
    assert x_q.shape == (0, 64) and x_scale.shape == (0,) and x_q.is_cuda
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", OPERATORS)
def test_fp32_is_refused_on_a_gpu(op: str) -> None:
    with pytest.raises(ValueError, match="given torch.float32 on cuda:0, allowed torch.bfloat16, torch.float16"):
        getattr(act_quant, op)(*_on_gpu(make_arguments(op, 2, 64, torch.float32)))


@pytest.mark.parametrize("tokens", [32, 700])
@pytest.mark.parametrize("op", OPERATORS)
def test_a_graph_captured_on_a_side_stream_quantises_the_data_of_the_replay(op: str, tokens: int) -> None:
    static = _on_gpu(make_arguments(op, tokens, 4096, torch.bfloat16))
    operator = getattr(act_quant, op)
    operator(*static)  # compiles and loads
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        # A chain of kernels that each may start before the one in front has ended.
        for _ in range(4):
            outputs = operator(*static)
    for seed in (11, 12):
        arguments = make_arguments(op, tokens, 4096, torch.bfloat16, seed=seed)
        for ours, new in zip(static, arguments, strict=True):
            if isinstance(ours, torch.Tensor):
                ours.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        _assert_like_cpu(op, outputs, arguments)


def test_a_kernel_sees_all_that_the_one_before_it_wrote() -> None:
    """Early start is not early reading: each step quantises what the last one produced."""
    x = torch.randn(512, 4096, device="cuda").bfloat16()
    weight = torch.ones(4096, device="cuda").bfloat16()
    total = expected = x
    for _ in range(20):
        *_, total = act_quant.fused_add_rms_norm_quant(x, total, weight, 1e-5)
    for _ in range(20):
        expected = (x.float() + expected.float()).to(x.dtype)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_finds_nothing_wrong_on_a_gpu(op: str) -> None:
    arguments = _on_gpu(make_arguments(op, 5, 64, torch.bfloat16))
    torch.library.opcheck(getattr(torch.ops.kvcompile, op).default, arguments)
