"""The W4A8 kernels: sums equal to those of float64 bit for bit, outputs to the CPU's, graphs, streams, chains."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from kvcompile.ops import act_quant, launch, nvrtc, w4a8
from kvcompile.ops.w4a8 import cuda, fused, table
from kvcompile.ops.w4a8.fused import Tiling
from kvcompile.ops.w4a8.layout import tiles_along
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


def _kernels() -> set[tuple[Path, str, tuple[tuple[str, int], ...]]]:
    """(source, architecture, defines) of what the sums, the outputs and the chains below take."""
    device, found = torch.device("cuda", 0), set()
    cases = [
        *((shape, tokens, (3,)) for shape in SHAPES for tokens in TOKENS),
        *(((rows, 512, 64), tokens, (0, 1, 2)) for rows in (100, 256) for tokens in (1, 5, 31)),
        ((4096, 4096, 128), 16, (0, 3)),
    ]
    for ((rows, columns, group), tokens, outs), tiling in product(cases, TILINGS):
        groups = columns // group
        if cuda.limits(device).plan(tokens, rows, columns, groups, tiling):
            for out in outs:
                defines = fused.defines(tiling, tokens, columns, groups, out)
                found.add((cuda.SOURCES[tiling.wgmma], launch.arch_of(device), tuple(sorted(defines.items()))))
    return found


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Hundreds of kernels, half a second each: compiled side by side beforehand."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=spawn) as pool:
        for done in [pool.submit(nvrtc.compile, source, arch, dict(pairs)) for source, arch, pairs in _kernels()]:
            done.result()


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
    # Every block of a cluster needs a step of the input channels.
    steps = tiles_along(columns, 64 * fused.step_tiles(columns, columns // group))
    assert bool(launched) is (tiling.split <= steps)


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


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_a_product_waits_for_the_activations_that_the_kernels_before_it_write(tiling: Tiling) -> None:
    """Launches overlap: in replays of product, quantiser, product each sees what the one before it wrote."""
    if not _runs_here(tiling):
        pytest.skip("clusters and wgmma are Hopper's")
    tokens, slow, fast = 16, make_weight(4096, 4096, 128).cuda(), make_weight(512, 4096, 128).cuda()
    x_q, x_scale = (each.cuda() for each in make_activations(tokens, 4096))
    ones = torch.ones(tokens, device="cuda")

    def chain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # 40 products of the slow weight: long enough for all later blocks to be resident and waiting.
        for _ in range(40):
            y = cuda.fused_linear(x_q, x_scale, *slow.arguments, None, torch.bfloat16, tiling)
        q, scale = act_quant.quant_per_token(y)
        return q, scale, cuda.fused_linear(q, ones, *fast.arguments, None, torch.int32, tiling)

    chain()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        q, scale, sums = chain()
    rebuilt = w4a8.rebuild(fast.plain).double()
    for seed in range(20, 26):
        x_q.copy_(make_activations(tokens, 4096, seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        y = cuda.fused_linear(x_q, x_scale, *slow.arguments, None, torch.bfloat16, tiling)
        torch.cuda.synchronize()
        theirs_q, theirs_scale = act_quant.quant_per_token(y)
        assert torch.equal(q, theirs_q) and torch.equal(scale, theirs_scale)
        assert torch.equal(sums.double(), q.double() @ rebuilt.t())


def test_rebuilding_waits_for_the_product_that_still_reads_the_buffer() -> None:
    """The buffer of a rebuilt weight goes back to the allocator at once, and the next product's takes its place."""
    first, second = make_weight(2048, 2048, 128).cuda(), make_weight(2048, 2048, 128, seed=4).cuda()
    x_q, x_scale = (each.cuda() for each in make_activations(512, 2048))
    wanted = [
        cuda.fused_linear(x_q, x_scale, *weight.arguments, None, torch.float32, Tiling(1, 8, 4, 1, 1))
        for weight in (first, second)
    ]
    torch.cuda.synchronize()
    for _ in range(20):
        found = [
            cuda.rebuilt_linear(x_q, x_scale, *weight.arguments, None, torch.float32) for weight in (first, second)
        ]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_views_that_are_not_aligned_are_refused() -> None:
    weight = make_weight(24, 128, 64).cuda()
    x_q = torch.zeros(3 * 128 + 1, dtype=torch.int8, device="cuda")[1:].view(3, 128)
    with pytest.raises(ValueError, match="x_q starts 1 bytes off a multiple of 16"):
        w4a8.w4a8_linear(x_q, torch.ones(3, device="cuda"), *weight.arguments, None, torch.bfloat16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_product_on_the_second_gpu_is_that_on_the_first() -> None:
    weight = make_weight(256, 512, 64)
    x_q, x_scale = make_activations(5, 512)
    results = []
    for device in ("cuda:0", "cuda:1"):
        arguments = [each.to(device) for each in (x_q, x_scale, *weight.arguments)]
        results.append(w4a8.w4a8_linear(*arguments, None, torch.bfloat16).cpu())
    assert torch.equal(*results)


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
