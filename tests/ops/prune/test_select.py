"""From scores to kept tokens: counts, order, ties, chunks, and stages that take no token twice."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.prune import METHODS, parse_method, reference, select, select_layers


def _scores(method: str, length: int, kv_heads: int = 3, seed: int = 0) -> torch.Tensor:
    """Few different values, so that there are ties everywhere."""
    stages = len(parse_method(method).stages)
    return torch.randint(0, 5, (stages, kv_heads, length), generator=torch.Generator().manual_seed(seed)).float()


def _one(values: list[float], method: str = "andpro", keep: int = 0, **parameters: object) -> list[int]:
    """Kept tokens of one head without a sink and with a window of 1 behind the `values`."""
    chosen = parse_method(method, sink=0, window=1, **parameters)
    return select(torch.tensor([[[*values, 0.0]]]), chosen, keep)[0].tolist()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [12, 13, 14, 47, 60])
def test_every_budget_gives_the_reference_s_indices_ties_included(name: str, length: int) -> None:
    method, scores = parse_method(name, window=8), _scores(name, length, seed=length)
    for keep in range(12, length + 1):
        kept = select(scores, method, keep)
        assert kept.dtype == torch.int32 and kept.shape == (3, keep) and kept.is_contiguous()
        assert kept.tolist() == reference.select(scores, method, keep)
        assert (kept.diff(dim=1) > 0).all()
        assert {*range(4), *range(length - 8, length)} <= set(kept[0].tolist())


@pytest.mark.parametrize("anchor", [0.0, 0.3, 0.5, 1.0])
def test_every_share_gives_the_reference_s_indices(anchor: float) -> None:
    method, scores = parse_method("blend", window=5, sink=2, chunk=3, anchor=anchor), _scores("blend", 61)
    for keep in range(7, 62):
        assert select(scores, method, keep).tolist() == reference.select(scores, method, keep)


@pytest.mark.parametrize("name", METHODS)
def test_to_keep_everything_is_the_identity_whatever_the_scores(name: str) -> None:
    method = parse_method(name)
    for scores in (_scores(name, 77), torch.full_like(_scores(name, 77), float("nan"))):
        assert torch.equal(select(scores, method, 77), torch.arange(77, dtype=torch.int32).expand(3, -1))
    assert select(_scores(name, 36), method, 36).tolist() == [list(range(36))] * 3


def test_chunks_are_kept_whole_by_their_sum_and_the_last_one_by_its_best_tokens() -> None:
    values = [9.0, 0, 0, 0, 3, 3, 3, 3, 1, 4, 2, 3]
    assert _one(values, keep=5) == [4, 5, 6, 7, 12]
    assert _one(values, keep=7) == [4, 5, 6, 7, 9, 11, 12]
    assert _one(values, keep=9) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert _one(values, keep=4) == [5, 6, 7, 12]


def test_a_chunk_is_summed_from_its_first_token_to_its_last() -> None:
    # 1e8 swallows what is added to it before it is taken away: only the second chunk is above 0.
    assert _one([1.0, 1e8, -1e8, 0.0, 1e8, -1e8, 1.0, 0.0], keep=5) == [4, 5, 6, 7, 8]
    assert _one([1e8, -1e8, 1.0, 0.0, 1.0, 1e8, -1e8, 0.0], keep=5) == [0, 1, 2, 3, 8]


def test_a_short_chunk_at_the_end_scores_what_it_holds() -> None:
    assert _one([1.0, 1, 1, 1, 3, 2], keep=3) == [4, 5, 6]
    assert _one([1.0, 1, 1, 1, 1, 2], keep=5) == [0, 1, 2, 3, 6]


def test_ties_go_to_the_later_position() -> None:
    assert _one([0.0] * 12, keep=5) == [8, 9, 10, 11, 12]
    assert _one([0.0] * 12, keep=7) == [6, 7, 8, 9, 10, 11, 12]
    assert _one([0.0, -0.0, 0.0], "tova", keep=2) == [2, 3]


def test_nan_and_infinities_leave_the_count_right() -> None:
    nan, inf = float("nan"), float("inf")
    assert _one([1.0, nan, 3.0, inf, -inf, -inf], "tova", keep=3) == [1, 3, 6]
    assert _one([-inf] * 6, keep=4) == [3, 4, 5, 6]


def test_the_second_stage_fills_up_with_what_the_first_did_not_take() -> None:
    method = parse_method("blend", sink=0, window=1, chunk=2)
    first = [5.0, 5, 1, 1, 0, 0, 0, 0, 0]
    second = [9.0, 9, 0, 0, 0, 3, 2, 2, 0]
    scores = torch.tensor([[first], [second]])
    assert select(scores, method, 5)[0].tolist() == [0, 1, 4, 5, 8]
    assert select(scores, method, 7)[0].tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert select(scores, method, 4)[0].tolist() == [
        0,
        1,
        5,
        8,
    ]  # half of 3 is no whole chunk


def test_critical_takes_half_by_attention_and_half_by_attention_times_the_norm() -> None:
    method = parse_method("critical", sink=0, window=1)
    attention, weighted = [9.0, 8, 7, 1, 1, 0], [1.0, 1, 1, 5, 6, 0]
    assert select(torch.tensor([[attention], [weighted]]), method, 5)[0].tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("scores", "keep", "message"),
    [
        (torch.zeros(1, 2, 50), 35, "keep: given 35 tokens, allowed at least 36: sink 4 and window 32"),
        (torch.zeros(1, 2, 50), 51, "keep: given 51 tokens, allowed at most the 50 there are"),
        (torch.zeros(1, 2, 35), 35, "scores: given 35 tokens, allowed at least 36: sink 4 and window 32"),
        (torch.zeros(2, 2, 50), 40, "scores: given 2 stages, allowed the 1 of andpro"),
        (
            torch.zeros(2, 50),
            40,
            r"scores: given torch.float32 \(2, 50\) on cpu, allowed torch.float32 \[stages, KV heads, tokens\]",
        ),
        (torch.zeros(1, 2, 50).double(), 40, "scores: given torch.float64 .* allowed torch.float32"),
    ],
)
def test_it_says_what_does_not_fit(scores: torch.Tensor, keep: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^kvcompile::prune_select: {message}"):
        select(scores, parse_method("andpro"), keep)


def test_layers_together_keep_what_each_keeps_by_itself() -> None:
    method = parse_method("robust", window=3)
    layers = [torch.randn(3, 2, 61, generator=torch.Generator().manual_seed(seed)) for seed in range(18)]
    for keep, of_layer in zip(select_layers(layers, method, 30), layers, strict=True):
        assert torch.equal(keep, select(of_layer, method, 30))
    assert select_layers([], method, 30) == []


def test_layers_together_say_what_does_not_fit() -> None:
    method = parse_method("andpro")
    with pytest.raises(ValueError, match="prune_select: keep: given 51 tokens, allowed at most the 50 there are"):
        select_layers([torch.zeros(1, 2, 60), torch.zeros(1, 2, 50)], method, 51)
    with pytest.raises(ValueError, match="scores: given 2 stages, allowed the 1 of andpro"):
        select_layers([torch.zeros(1, 2, 50), torch.zeros(2, 2, 50)], method, 40)
