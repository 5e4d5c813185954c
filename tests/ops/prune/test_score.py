"""`kvcompile::prune_score` against loops in float64, for every method, and what it must not depend on."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES
from kvcompile.ops.prune import METHODS, Method, cpu, pages_of, parse_method, prune_score, reference, select
from tests.ops.kv8.batches import POISON
from tests.ops.prune.prompts import WINDOW, Prompt, make_prompt

ATTENTIVE = [name for name in METHODS if name not in ("streaming", "random")]


def _method(name: str, **parameters: object) -> Method:
    return parse_method(name, window=WINDOW, **parameters)


def _small_tiles(monkeypatch: pytest.MonkeyPatch, prompt: Prompt, tokens: int) -> None:
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", prompt.query.shape[0] * prompt.query.shape[1] * tokens)


def _assert_like_reference(prompt: Prompt, method: Method) -> None:
    """Scores to fp32's rounding, relative to the largest, and the very indices at several budgets."""
    scores, expected = prompt.score(method), prompt.expected(method)
    assert scores.dtype == torch.float32 and scores.shape == expected.shape
    for found, wanted in zip(scores.double(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6 * wanted.abs().max().item())
    evictable = prompt.length - method.always_kept
    for budget in sorted({0, min(1, evictable), evictable // 4, evictable // 2, max(0, evictable - 3), evictable}):
        keep = method.always_kept + budget
        assert select(scores, method, keep).tolist() == reference.select(expected, method, keep)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [12, 13, 33, 64, 101])
def test_scores_and_indices_are_the_reference_s_for_odd_lengths_and_tiles(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(length, seed=length)
    _small_tiles(monkeypatch, prompt, 7)
    _assert_like_reference(prompt, _method(name))


@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2), (7, 1)])
def test_scores_and_indices_are_the_reference_s_for_every_group_size(name: str, heads: int, kv_heads: int) -> None:
    _assert_like_reference(make_prompt(45, heads=heads, kv_heads=kv_heads), _method(name))


@pytest.mark.parametrize("name", ["andpro", "critical"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_scores_and_indices_are_the_reference_s_for_every_head_size(name: str, head_size: int, block_size: int) -> None:
    _assert_like_reference(make_prompt(41, head_size=head_size, block_size=block_size), _method(name))


@pytest.mark.parametrize("kernel", [1, 3, 5, 13, 61])
@pytest.mark.parametrize("name", ["andpro", "snapkv"])
def test_scores_and_indices_are_the_reference_s_for_every_kernel(
    name: str, kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(53)
    _small_tiles(monkeypatch, prompt, 9)
    _assert_like_reference(prompt, _method(name, kernel=kernel))


@pytest.mark.parametrize("sink", [0, 1, 6])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_scores_and_indices_are_the_reference_s_for_every_sink_and_chunk(sink: int, chunk: int) -> None:
    _assert_like_reference(make_prompt(50), _method("blend", sink=sink, chunk=chunk, anchor=0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_are_scored_in_fp32(dtype: torch.dtype) -> None:
    _assert_like_reference(make_prompt(40, dtype=dtype), _method("blend"))


def test_the_scores_of_andpro_sum_to_the_squared_norms_of_the_anchors() -> None:
    prompt = make_prompt(301, heads=6, kv_heads=2, window=32)
    keys, values = (x.repeat_interleave(3, 1).transpose(0, 1) for x in prompt.keys_and_values())
    logits = prompt.query.double().transpose(0, 1) @ keys.transpose(1, 2) * prompt.scale
    causal = torch.arange(301)[None] <= torch.arange(301 - 32, 301)[:, None]
    weights = logits.masked_fill(~causal, float("-inf")).softmax(-1)
    pooled = torch.nn.functional.max_pool1d(weights, 7, stride=1, padding=3)[..., 4:-32]
    norms = (pooled @ values[:, 4:-32]).square().sum()
    scores = prompt.score(parse_method("andpro")).double()
    torch.testing.assert_close(scores.sum(), norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("factor", [2.0, 0.25, 3.0])
def test_scaling_the_values_scales_the_scores_of_andpro_by_the_square(factor: float) -> None:
    prompt = make_prompt(70)
    before = prompt.score(_method("andpro"))
    prompt.cache[:, 1, ..., -4:].copy_(
        (prompt.cache[:, 1, ..., -4:].contiguous().view(torch.float32) * factor).view(torch.int8)
    )
    after = prompt.score(_method("andpro"))
    if factor == 3.0:
        torch.testing.assert_close(after, before * 9, rtol=1e-5, atol=1e-6 * after.max().item())
    else:
        assert torch.equal(after, before * factor**2)


def _ignored(prompt: Prompt, *positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value where every query attends to the `positions` with a weight of exactly 0."""
    query = prompt.query.clone()
    query[..., 0] = 30.0
    keys, values = (x.float() for x in prompt.keys_and_values())
    keys[..., 0] = 0.0
    keys[list(positions)] = 0.0
    keys[list(positions), :, 0] = -1000.0
    return query, keys, values


@pytest.mark.parametrize(("kernel", "ignored"), [(1, ()), (1, (30,)), (7, range(25, 32))])
def test_a_token_that_nothing_attends_to_scores_0_and_changes_no_other_score(
    kernel: int, ignored: tuple[int, ...]
) -> None:
    # A pooled weight spreads to its neighbours, so with a kernel the new token joins others that are ignored.
    prompt, method = make_prompt(60), _method("andpro", kernel=kernel)
    query, keys, values = _ignored(prompt, *ignored)
    before = prune_score(query, *pages_of(keys, values), 60, 0.125, method)

    longer = [torch.cat([x[:28], torch.zeros_like(x[:1]), x[28:]]) for x in (keys, values)]
    longer[0][28, :, 0], longer[1][28] = -1000.0, 5.0
    after = prune_score(query, *pages_of(*longer), 61, 0.125, method)
    assert not after[..., 28].any()
    others = torch.cat([after[..., :28], after[..., 29:]], -1)
    torch.testing.assert_close(others, before, rtol=1e-5, atol=1e-6 * before.max().item())


@pytest.mark.parametrize("name", METHODS)
def test_tiled_is_untiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, method = make_prompt(333, window=32), parse_method(name)
    whole = prompt.score(method)
    for tokens in (1, 3, 50, 64):
        _small_tiles(monkeypatch, prompt, tokens)
        tiled = prompt.score(method)
        torch.testing.assert_close(tiled, whole, rtol=1e-4, atol=1e-6 * whole.max().item())
        assert torch.equal(select(tiled, method, 150), select(whole, method, 150))


def test_keys_and_values_are_read_twice_in_tiles_of_a_width_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompt(700)
    _small_tiles(monkeypatch, prompt, 20)
    widths = []
    monkeypatch.setattr(cpu.pages, "read", lambda *a, read=cpu.pages.read: widths.append(a[-1] - a[-2]) or read(*a))
    prompt.score(_method("blend"))
    assert max(widths) == 20 + 2 * 3
    assert sum(widths) > 4 * 600  # keys twice and values twice


def _value_case(orthogonal: bool) -> list[int]:
    """The evictable chunk that andpro keeps: tokens 12 to 15 are attended to most, 24 to 27 next.

    Their values point along the anchor, or (`orthogonal`) those of the first chunk cancel each other.
    """
    length = 4 + 10 * 4 + 32
    query, key, value = torch.zeros(32, 1, 64), torch.zeros(length, 1, 64), torch.zeros(length, 1, 64)
    query[..., 0] = 8.0
    key[12:16, :, 0], key[24:28, :, 0] = 2.0, 1.8
    value[..., 1] = 1.0
    if orthogonal:
        value[12:16, :, 1] = 0.0
        value[12:16, :, 2] = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    scores = prune_score(query, *pages_of(key, value), length, 0.125, parse_method("andpro"))
    return select(scores, parse_method("andpro"), 4 + 4 + 32)[0, 4:8].tolist()


def test_the_value_term_decides_where_attention_alone_would_keep_other_tokens() -> None:
    assert _value_case(orthogonal=False) == [12, 13, 14, 15]
    assert _value_case(orthogonal=True) == [24, 25, 26, 27]


def test_heads_keep_different_tokens_and_the_same_number() -> None:
    prompt, method = make_prompt(200, heads=6, kv_heads=3), _method("andpro")
    kept = select(prompt.score(method), method, 80)
    assert kept.shape == (3, 80)
    assert len({tuple(row) for row in kept.tolist()}) == 3


def test_tova_and_the_second_stage_of_blend_rank_alike_for_every_head() -> None:
    prompt = make_prompt(90, heads=6, kv_heads=3)
    last, (_, second) = prompt.score(_method("tova"))[0], prompt.score(_method("blend"))
    assert torch.equal(last[0], last[1]) and torch.equal(last[0], last[2])
    torch.testing.assert_close(second, last, rtol=1e-5, atol=1e-9)


def test_random_depends_on_the_seed_and_the_length_alone() -> None:
    method = _method("random", seed=3)
    a, b = make_prompt(90, seed=1).score(method), make_prompt(90, seed=2, heads=8, kv_heads=4).score(method)
    assert torch.equal(a[0, 0], b[0, 3])
    assert a[0, 0, 4:82].tolist() == [x / 2**24 for x in reference.random_bits(3, 90)[4:82]]
    kept = {
        tuple(select(make_prompt(length).score(_method("random", seed=seed)), _method("random"), 40)[0, 4:32].tolist())
        for seed, length in ((0, 90), (1, 90), (2**32 - 1, 90), (0, 91))
    }
    assert len(kept) == 4


def test_streaming_keeps_the_sink_and_the_most_recent() -> None:
    method = _method("streaming")
    assert select(make_prompt(60).score(method), method, 20)[1].tolist() == [0, 1, 2, 3, *range(44, 60)]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [33, 47, 48])
def test_what_no_position_maps_to_never_reaches_a_score(name: str, length: int) -> None:
    prompt = make_prompt(length)
    poisoned = prompt.score(_method(name))
    scales = prompt.cache[..., -4:].contiguous().view(torch.float32)
    assert (~scales.isnan()).sum() == 2 * 2 * length  # a leak would show
    assert not poisoned.isnan().any()
    prompt.cache[(prompt.cache == POISON).all(-1)] = 7
    assert torch.equal(prompt.score(_method(name)), poisoned)


def test_logits_that_differ_by_thousands_neither_overflow_nor_give_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = make_prompt(80)
    prompt.query *= 1e4
    _small_tiles(monkeypatch, prompt, 6)
    for name in ATTENTIVE:
        assert prompt.score(_method(name)).isfinite().all()
    # A logit of 1e5 is exact to 0.01 in fp32, which is 1 % of a weight.
    found, expected = prompt.score(_method("andpro")).double(), prompt.expected(_method("andpro"))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3 * expected.abs().max().item())


def test_pages_far_apart_and_queries_in_a_fused_tensor_give_the_same() -> None:
    prompt, method = make_prompt(60), _method("blend")
    expected = prompt.score(method)
    apart = torch.full((prompt.cache.shape[0], 2, *prompt.cache.shape[1:]), POISON, dtype=torch.int8)
    apart[:, 1] = prompt.cache
    fused = torch.randn(WINDOW, 10, 64)
    fused[:, 2:8] = prompt.query
    prompt.cache, prompt.query = apart[:, 1], fused[:, 2:8]
    assert torch.equal(prompt.score(method), expected)


def test_tensors_score_as_the_pages_that_they_would_be_stored_in() -> None:
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(50, 2, 64, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(WINDOW, 6, 64, generator=generator)
    cache, row = pages_of(key, value, block_size=32)
    assert (cache.shape, cache.dtype, row.tolist()) == ((2, 2, 32, 2, 68), torch.int8, [0, 1])
    keys, values = reference.keys_and_values(cache, row, 50)
    assert (keys - key.double()).abs().max() <= key.double().abs().max() / 253
    expected = reference.score(query.double(), keys, values, 0.125, _method("andpro"))
    found = prune_score(query, cache, row, 50, 0.125, _method("andpro")).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * expected.max().item())


def test_a_prompt_without_evictable_tokens_scores_nothing() -> None:
    for name in METHODS:
        assert not make_prompt(WINDOW + 4).score(_method(name)).any()
        assert not make_prompt(WINDOW).score(_method(name)).any()
