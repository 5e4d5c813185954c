"""The W4A8 kernels: sums equal to those of float64 bit for bit, outputs to the CPU's, graphs, streams, chains."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops import w4a8
from kvcompile.ops.w4a8 import cuda, table
from kvcompile.ops.w4a8.fused import Tiling
from tests.ops.w4a8.weights import make_activations, make_weight

pytestmark = pytest.mark.gpu

SHAPES = [
    (4096, 4096, 128),
    (4096, 14336, 128),
    (100, 512, 64),
    (257, 576, 192),
    (33, 4304, 4304),
    (16, 64, 64),
    (1, 48, 48),
    (1001, 576, 64),
    (48, 65536, 128),
    (24, 768, 256),
]
TOKENS = (1, 2, 3, 8, 9, 15, 17, 33, 65, 129, 255, 257)
# One of each kind: one or two tiles a read, phases, clusters of 2 to 8, several blocks on a multiprocessor, wgmma.
TILINGS = (
    Tiling(1, 8, 8, 1, 1),
    Tiling(2, 8, 6, 1, 1),
    Tiling(1, 4, 3, 1, 2),
    Tiling(2, 8, 6, 2, 1),
    Tiling(1, 12, 4, 4, 1),
    Tiling(2, 8, 4, 8, 1),
    Tiling(4, 8, 3, 1, 1),
    Tiling(4, 16, 4, 2, 1),
    Tiling(4, 12, 3, 4, 1),
)


def _runs_here(tiling: Tiling) -> bool:
    """Clusters need compute capability 9.0, wgmma exactly that."""
    capability = torch.cuda.get_device_capability()
    return capability == (9, 0) or not tiling.wgmma and (tiling.split == 1 or capability >= (9, 0))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_sums_of_every_tiling_are_exact(rows: int, columns: int, group: int, tiling: Tiling) -> None:
    if not _runs_here(tiling):
        pytest.skip("clusters and wgmma are Hopper's")
    weight = make_weight(rows, columns, group).cuda()
    rebuilt = w4a8.rebuild(weight.plain)
    launched = 0
    for tokens in TOKENS:
        x_q, x_scale = (each.cuda() for each in make_activations(tokens, columns))
        arguments = x_q, x_scale, *weight.arguments, None, torch.int32
        if not cuda.limits(x_q.device).plan(tokens, rows, columns, columns // group, tiling):
            with pytest.raises(ValueError, match="does not fit"):
                cuda.fused_linear(*arguments, tiling)
            continue
        sums = cuda.fused_linear(*arguments, tiling)
        assert torch.equal(sums.double(), x_q.double() @ rebuilt.double().t()), f"{tokens} tokens"
        launched += 1
    assert launched


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_a_rebuilt_weight_is_that_of_the_reference(rows: int, columns: int, group: int) -> None:
    weight = make_weight(rows, columns, group)
    on_gpu = weight.cuda()
    rebuilt = cuda.rebuild(on_gpu.tiles, on_gpu.group_params, rows, columns)
    assert torch.equal(rebuilt.cpu(), w4a8.rebuild(weight.plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 17, 64, 600])
@pytest.mark.parametrize(("rows", "columns", "group"), [(4096, 4096, 128), (257, 576, 64), (33, 4304, 4304)])
def test_the_operator_equals_the_cpus_within_one_rounding(
    rows: int, columns: int, group: int, tokens: int, dtype: torch.dtype
) -> None:
    weight = make_weight(rows, columns, group)
    x_q, x_scale = make_activations(tokens, columns)
    for bias in (None, torch.randn(rows).to(dtype)):
        theirs = w4a8.w4a8_linear(x_q, x_scale, *weight.arguments, bias, dtype)
        ours = w4a8.w4a8_linear(
            x_q.cuda(), x_scale.cuda(), *weight.cuda().arguments, None if bias is None else bias.cuda(), dtype
        )
        # CUTLASS takes the scales in another order: one rounding of the output's dtype, and of fp32 where that is it.
        eps = max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=eps, atol=eps * theirs.abs().max().item() if tokens else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_fused_outputs_equal_the_cpus_bit_for_bit(tiling: Tiling, dtype: torch.dtype) -> None:
    if not _runs_here(tiling):
        pytest.skip("clusters and wgmma are Hopper's")
    for rows in (100, 256):  # 16-byte stores need a multiple of 8
        weight = make_weight(rows, 512, 64)
        bias = torch.randn(rows).to(dtype)
        for tokens in (1, 5, 31):
            x_q, x_scale = make_activations(tokens, 512)
            theirs = w4a8.w4a8_linear(x_q, x_scale, *weight.arguments, bias, dtype)
            ours = cuda.fused_linear(x_q.cuda(), x_scale.cuda(), *weight.cuda().arguments, bias.cuda(), dtype, tiling)
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("tokens", [1, 24, 300])
def test_a_graph_captured_on_a_side_stream_replays_with_other_data(tokens: int) -> None:
    weight = make_weight(512, 1024, 128).cuda()
    x_q, x_scale = (each.cuda() for each in make_activations(tokens, 1024))
    arguments = x_q, x_scale, *weight.arguments, None, torch.bfloat16
    w4a8.w4a8_linear(*arguments)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        # A chain, so that each launch may overlap with the one before and still has to see what that one wrote.
        first = w4a8.w4a8_linear(*arguments)
        y = w4a8.w4a8_linear(*arguments) + first
    for seed in (7, 8, 9):
        new_q, new_scale = make_activations(tokens, 1024, seed)
        x_q.copy_(new_q)
        x_scale.copy_(new_scale)
        graph.replay()
        assert torch.equal(y, w4a8.w4a8_linear(*arguments) + w4a8.w4a8_linear(*arguments))


def test_a_chain_of_products_sees_what_each_before_wrote() -> None:
    """Programmatic launches overlap: the activations of each product come from the product before it."""
    weight = make_weight(1024, 1024, 128).cuda()
    rebuilt = w4a8.rebuild(weight.plain).double()
    x_q, ones = make_activations(3, 1024)[0].cuda(), torch.ones(3, device="cuda")
    for _ in range(50):
        sums = w4a8.w4a8_linear(
            x_q,
            ones,
            weight.tiles,
            weight.group_params,
            torch.ones_like(weight.plain.channel_scales),
            None,
            torch.float32,
        )
        assert torch.equal(sums.double(), x_q.double() @ rebuilt.t())
        x_q = (sums.long() % 255 - 127).to(torch.int8)


def test_what_a_table_chooses_fits_and_many_tokens_are_left_to_the_int8_product() -> None:
    limits = cuda.limits(torch.device("cuda", torch.cuda.current_device()))
    for rows, columns in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 576)):
        for tokens in (1, 7, 16, 33, 100):
            tiling = table.choose(limits, tokens, rows, columns, columns // 64)
            assert tiling is None or limits.plan(tokens, rows, columns, columns // 64, tiling)
        assert table.choose(limits, 16384, rows, columns, columns // 64) is None


def test_arguments_on_two_devices_are_refused() -> None:
    weight = make_weight(24, 128, 64)
    x_q, x_scale = make_activations(3, 128)
    with pytest.raises(ValueError, match="x_scale is on cpu, x_q on cuda:0"):
        w4a8.w4a8_linear(x_q.cuda(), x_scale, *weight.cuda().arguments, None, torch.bfloat16)
