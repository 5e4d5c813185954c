"""What pruning's kernels select and move, bit for bit as on the CPU, in CUDA graphs and out of them."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops import launch
from kvcompile.ops.kv8 import HEAD_SIZES
from kvcompile.ops.prune import (
    METHODS,
    cuda,
    cuda_move,
    cuda_select,
    parse_method,
    prune_compact,
    prune_copy,
    prune_score,
    select,
    select_layers,
)
from tests.gpu.prune_prompts import on_gpu, score_on_gpu
from tests.ops.kv8.batches import poisoned_cache
from tests.ops.prune.prompts import WINDOW, Prompt, draw_keep, make_prompt

pytestmark = pytest.mark.gpu


def _adversarial(stages: int, kv_heads: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, -1.0, 1.0, 1e-42, 3e38])
    shape = stages, kv_heads, length
    return [
        torch.zeros(shape),
        torch.full(shape, nan),
        -torch.arange(length).float().expand(shape).clone(),
        torch.randint(0, 5, shape, generator=generator).float(),
        torch.randn(shape, generator=generator),
        odd[torch.randint(0, len(odd), shape, generator=generator)],
    ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [36, 37, 47, 300, 4099])
def test_the_selection_is_that_of_the_cpu_bit_for_bit(name: str, length: int) -> None:
    method = parse_method(name)
    for scores in _adversarial(len(method.stages), 3, length):
        for keep in {36, min(37, length), (length + 36) // 2, max(36, length - 3), length}:
            assert torch.equal(select(scores.cuda(), method, keep).cpu(), select(scores, method, keep))


@pytest.mark.parametrize("name", ["andpro", "blend", "robust"])
def test_the_selection_of_layers_together_is_that_of_the_cpu(name: str) -> None:
    """Of more than one launch takes, and of layers that differ."""
    method = parse_method(name)
    layers = [scores for heads in (3, 3, 2, 3) for scores in _adversarial(len(method.stages), heads, 4099)]
    found = select_layers([scores.cuda() for scores in layers], method, 2000)
    assert len(found) == 24
    for keep, scores in zip(found, layers, strict=True):
        assert torch.equal(keep.cpu(), select(scores, method, 2000))


@pytest.mark.parametrize("chunk", [1, 3, 8, 2000])
@pytest.mark.parametrize("anchor", [0.0, 0.3, 1.0])
def test_the_selection_of_every_chunk_and_share_is_that_of_the_cpu(chunk: int, anchor: float) -> None:
    method = parse_method("blend", chunk=chunk, anchor=anchor, sink=1, window=1)
    for scores in _adversarial(2, 2, 5001):
        for keep in (2, 3, 700, 4000):
            assert torch.equal(select(scores.cuda(), method, keep).cpu(), select(scores, method, keep))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("length", "first", "block_size"), [(101, 48, 16), (33, 16, 16), (5000, 2048, 64)])
def test_compaction_writes_the_bytes_of_the_cpu(length: int, first: int, block_size: int, head_size: int) -> None:
    layers = [make_prompt(length, kv_heads=3, head_size=head_size, block_size=block_size, seed=i) for i in range(20)]
    layers[4:6] = [
        make_prompt(length, kv_heads=2, heads=2, head_size=64, block_size=block_size, seed=i) for i in range(2)
    ]
    row, kept = layers[0].row, length - first
    keeps = [draw_keep(length, kept, layer.cache.shape[3], i) for i, layer in enumerate(layers)]
    keeps[1] = torch.arange(kept, dtype=torch.int32).expand(3, -1).contiguous()
    keeps[2] = torch.arange(first, length, dtype=torch.int32).expand(3, -1).contiguous()
    on_gpu = [layer.cache.cuda() for layer in layers]
    prune_compact(on_gpu, row.cuda(), [keep.cuda() for keep in keeps], length, first)
    prune_compact([layer.cache for layer in layers], row, keeps, length, first)
    for ours, layer in zip(on_gpu, layers, strict=True):
        assert torch.equal(ours.cpu(), layer.cache)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("kept", "first"), [(1, 0), (53, 48), (1000, 7)])
def test_a_copy_writes_the_bytes_of_the_cpu(kept: int, first: int, head_size: int) -> None:
    prompt = make_prompt(1001, kv_heads=3, head_size=head_size, block_size=48)
    keep, columns = draw_keep(1001, kept, 3), -(-(first + kept) // 16)
    row = torch.randperm(columns + 2)[:columns].int()
    ours = poisoned_cache(columns + 2, 16, 3, head_size)
    theirs = ours.cuda()
    prune_copy(prompt.cache, prompt.row, ours, row, keep, first)
    prune_copy(prompt.cache.cuda(), prompt.row.cuda(), theirs, row.cuda(), keep.cuda(), first)
    assert torch.equal(theirs.cpu(), ours)


def test_blocks_further_than_2_gib_into_the_cache_are_found() -> None:
    prompt, method = make_prompt(300, heads=32, kv_heads=8, head_size=128, window=32), parse_method("blend")
    prompt.query = prompt.query.bfloat16()
    small, blocks = prompt.cache.cuda(), 70_000
    cache = torch.full((blocks, *small.shape[1:]), -1, dtype=torch.int8, device="cuda")
    base = blocks - small.shape[0]
    cache[base:] = small
    row = torch.where(prompt.row < blocks, prompt.row + base, prompt.row).cuda()
    scores = prune_score(prompt.query.cuda(), cache, row, 300, prompt.scale, method)
    assert torch.equal(scores.cpu(), score_on_gpu(prompt, method))
    keep = select(scores, method, 300 - 128)
    prune_compact([cache], row, [keep], 300, 128)
    prune_compact([prompt.cache], prompt.row, [keep.cpu()], 300, 128)
    assert torch.equal(cache[base:].cpu(), prompt.cache)


@pytest.mark.parametrize("name", ["blend", "robust", "snapkv", "critical", "random", "streaming"])
def test_scoring_selection_and_compaction_replay_as_a_graph(name: str) -> None:
    method = parse_method(name)
    prompts = [make_prompt(700, heads=8, kv_heads=2, window=32, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    p, weight = on_gpu(prompts[0]), prompts[0].output_weight.bfloat16().cuda()

    def prune() -> torch.Tensor:
        scores = prune_score(p.query, p.cache, p.row, p.length, p.scale, method, weight)
        keep = select(scores, method, 700 - 320)
        prune_compact([p.cache], p.row, [keep], 700, 320)
        return keep

    prune()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = prune()
    for prompt in prompts:
        p.query.copy_(prompt.query)
        p.cache.copy_(prompt.cache)
        p.row.copy_(prompt.row)
        graph.replay()
        replayed, cache = keep.cpu(), p.cache.cpu()
        assert torch.equal(replayed, select(score_on_gpu(prompt, method), method, 700 - 320))
        prune_compact([prompt.cache], prompt.row, [replayed], 700, 320)
        assert torch.equal(cache, prompt.cache)


@pytest.mark.parametrize("name", METHODS)
def test_a_short_prompt_compiles_all_that_longer_ones_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server relies on that prunes a made-up prompt at its start."""
    for cached in (cuda._kernel, cuda_move._kernel, cuda_select._kernel):
        cached.cache_clear()  # of the tests before
    shape = {"heads": 8, "kv_heads": 2, "window": 32, "dtype": torch.bfloat16}
    short, long = (on_gpu(make_prompt(length, **shape)) for length in (68, 5000))
    method, weight = parse_method(name), short.output_weight.to("cuda", torch.bfloat16)

    def prune(p: Prompt, first: int) -> None:
        keep = select(prune_score(p.query, p.cache, p.row, p.length, p.scale, method, weight), method, p.length - first)
        prune_copy(p.cache, p.row, p.cache.clone(), p.row, keep, first)
        prune_compact([p.cache], p.row, [keep], p.length, first)

    prune(short, 16)
    monkeypatch.setattr(launch, "kernel", lambda *_, **__: pytest.fail("compiled too late"))
    prune(long, 2048)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    p, method = on_gpu(make_prompt(60)), parse_method("andpro", window=WINDOW)
    with pytest.raises(ValueError, match=r"prune_score: query: given torch.float32 on cuda:0, allowed torch.bfloat16"):
        prune_score(p.query, p.cache, p.row, 60, p.scale, method)
    wide = parse_method("andpro", window=WINDOW, kernel=35)
    with pytest.raises(ValueError, match="prune_score: kernel: given 35, allowed an odd number from 1 to 33"):
        prune_score(p.query.bfloat16(), p.cache, p.row, 60, p.scale, wide)
    with pytest.raises(ValueError, match="prune_score: query: given strides .* allowed stride 1 within a head"):
        prune_score(p.query.bfloat16().transpose(1, 2).contiguous().transpose(1, 2), p.cache, p.row, 60, 0.1, method)
    with pytest.raises(ValueError, match=r"prune_compact: keeps\[0\]: given shape \(2, 10\)"):
        keep = torch.zeros(2, 10, dtype=torch.int32, device="cuda")
        prune_compact([p.cache], p.row, [keep], 60, 32)
