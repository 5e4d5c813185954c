"""The scores of pruning's kernels against float64 and the CPU: shapes, types, methods and parameters."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES
from kvcompile.ops.prune import METHODS, Method, parse_method, prune_score, select
from kvcompile.ops.prune.score_shape import MOST_REACH
from tests.gpu.prune_prompts import on_gpu, score_on_gpu
from tests.ops.prune.prompts import WINDOW, Prompt, make_prompt

pytestmark = pytest.mark.gpu

ATTENTIVE = [name for name in METHODS if name not in ("streaming", "random")]
# Of the largest score of a stage: queries, weights and anchors are rounded to fp16.
TOLERANCE = 2e-3


def _assert_close(found: torch.Tensor, expected: torch.Tensor, method: Method) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float32
    always = [*range(method.sink), *range(max(0, found.shape[2] - method.window), found.shape[2])]
    assert not found[..., always].any()
    for stage, (ours, theirs) in enumerate(zip(found.double(), expected.double(), strict=True)):
        error = ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()
        assert error <= TOLERANCE, f"stage {stage}: {error:.2e}"


def _assert_like_cpu(prompt: Prompt, method: Method) -> None:
    _assert_close(score_on_gpu(prompt, method), prompt.score(method), method)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [12, 13, 33, 64, 101, 200])
def test_scores_are_those_of_float64(name: str, length: int) -> None:
    prompt, method = make_prompt(length, dtype=torch.bfloat16, seed=length), parse_method(name, window=WINDOW)
    _assert_close(score_on_gpu(prompt, method), prompt.expected(method), method)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_scores_of_every_head_size_are_those_of_the_cpu(name: str, head_size: int, dtype: torch.dtype) -> None:
    prompt = make_prompt(1111, heads=8, kv_heads=2, head_size=head_size, window=32, dtype=dtype)
    _assert_like_cpu(prompt, parse_method(name))


@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (9, 3), (28, 4), (32, 2), (5, 1), (40, 10)])
def test_scores_of_every_ratio_of_heads_are_those_of_the_cpu(name: str, heads: int, kv_heads: int) -> None:
    prompt = make_prompt(777, heads=heads, kv_heads=kv_heads, head_size=128, window=32, dtype=torch.bfloat16)
    _assert_like_cpu(prompt, parse_method(name))


@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize("window", [1, 2, 33, 64, 130, 300])
def test_scores_of_every_window_are_those_of_the_cpu(name: str, window: int) -> None:
    for length in (window + 5, window + 70, 700):
        prompt = make_prompt(length, heads=6, kv_heads=2, head_size=64, window=window, dtype=torch.float16)
        _assert_like_cpu(prompt, parse_method(name, window=window))


@pytest.mark.parametrize("name", ["andpro", "blend", "robust"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 13, 2 * MOST_REACH + 1])
@pytest.mark.parametrize("sink", [0, 4, 100])
def test_scores_of_every_kernel_and_sink_are_those_of_the_cpu(name: str, kernel: int, sink: int) -> None:
    prompt = make_prompt(500, heads=8, kv_heads=2, head_size=128, window=32, dtype=torch.bfloat16)
    _assert_like_cpu(prompt, parse_method(name, kernel=kernel, sink=sink))


def test_a_kernel_of_means_may_be_wider_than_a_tile() -> None:
    prompt = make_prompt(500, heads=8, kv_heads=2, window=32, dtype=torch.bfloat16)
    _assert_like_cpu(prompt, parse_method("snapkv", kernel=201))


@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("length", [37, 1024, 1025, 5003])
def test_scores_of_every_block_size_and_length_are_those_of_the_cpu(name: str, length: int, block_size: int) -> None:
    prompt = make_prompt(length, heads=8, kv_heads=2, window=32, block_size=block_size, dtype=torch.bfloat16)
    _assert_like_cpu(prompt, parse_method(name))


@pytest.mark.parametrize("name", ATTENTIVE)
def test_neighbours_of_a_maximum_tie_exactly_and_repeats_are_equal(name: str) -> None:
    prompt, method = make_prompt(3000, heads=8, kv_heads=2, window=32, dtype=torch.bfloat16), parse_method(name)
    first = score_on_gpu(prompt, method)
    assert all(torch.equal(score_on_gpu(prompt, method), first) for _ in range(3))
    if name == "snapkv":
        # One token that all queries see most of: its weight is that of its neighbours too.
        assert (first[0].diff(dim=1) == 0).sum() > 1000


def test_values_of_very_different_scales_are_scored_alike() -> None:
    prompt, method = make_prompt(600, heads=8, kv_heads=2, window=32, dtype=torch.bfloat16), parse_method("andpro")
    scales = prompt.cache[:, 1, ..., -4:].contiguous().view(torch.float32)
    for factors in (1e-12, 1e12, torch.logspace(-6, 0, scales.numel()).view(scales.shape)):
        prompt.cache[:, 1, ..., -4:] = (scales * factors).view(torch.int8)
        _assert_like_cpu(prompt, method)
    prompt.cache[:, 1, ..., :-4] = 0
    assert not score_on_gpu(prompt, method).any()


def test_logits_that_differ_by_thousands_neither_overflow_nor_give_nan() -> None:
    prompt = make_prompt(400, heads=8, kv_heads=2, window=32, dtype=torch.bfloat16)
    prompt.query *= 1e4
    for name in ATTENTIVE:
        assert score_on_gpu(prompt, parse_method(name)).isfinite().all()


def test_a_prompt_of_the_default_method_keeps_the_tokens_of_the_cpu() -> None:
    prompt, method = make_prompt(4000, heads=32, kv_heads=8, head_size=128, window=32), parse_method("blend")
    prompt.query = prompt.query.bfloat16()
    ours, theirs = select(score_on_gpu(prompt, method), method, 1000), select(prompt.score(method), method, 1000)
    same = sum(len(set(a) & set(b)) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))
    assert same >= 0.995 * ours.numel()


def test_pages_far_apart_and_queries_in_a_fused_tensor_give_the_same() -> None:
    prompt, method = make_prompt(300, dtype=torch.bfloat16), parse_method("blend", window=WINDOW)
    expected = score_on_gpu(prompt, method)
    p = on_gpu(prompt)
    apart = torch.full((p.cache.shape[0], 3, *p.cache.shape[1:]), -1, dtype=torch.int8, device="cuda")
    apart[:, 1] = p.cache
    fused = torch.full((WINDOW, 10, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    fused[:, 2:8] = p.query
    found = prune_score(fused[:, 2:8], apart[:, 1], p.row, p.length, p.scale, method)
    assert torch.equal(found.cpu(), expected)
