"""Scores of all layers at once against the operator that the server runs, layer by layer."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import reference
from kvcompile.ops.prune import METHODS, pages_of, parse_method, prune_score, select
from kvcompile.tools.evaluate_model import Prompt
from kvcompile.tools.evaluate_scores import Scorer

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 3, 6, 2, 64, 8


def _prompt(length: int) -> tuple[Prompt, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        spread = torch.rand(*shape[:-1], 1, generator=generator) * 2 + 0.1
        return torch.randn(*shape, generator=generator) * spread

    keys, values = (
        reference.dequantise(reference.quantise(draw(LAYERS, KV_HEADS, length, HEAD_SIZE))).float() for _ in range(2)
    )
    weights = [torch.randn(24, HEADS * HEAD_SIZE, generator=generator) for _ in range(LAYERS)]
    return Prompt(draw(LAYERS, WINDOW, HEADS, HEAD_SIZE), keys, values, torch.empty(0)), weights


@pytest.mark.parametrize("length", [13, 61, 130])
@pytest.mark.parametrize("name", METHODS)
def test_scores_and_kept_tokens_are_those_of_the_operator(name: str, length: int) -> None:
    prompt, weights = _prompt(length)
    method = parse_method(name, window=WINDOW)
    scores = Scorer(prompt, HEAD_SIZE**-0.5, weights).score(method)
    assert scores.shape == (len(method.stages), LAYERS * KV_HEADS, length) and scores.dtype == torch.float32
    keep = (length + method.always_kept) // 2
    kept = select(scores, method, keep).view(LAYERS, KV_HEADS, keep)
    for layer in range(LAYERS):
        cache, row = pages_of(*(x[layer].transpose(0, 1).contiguous() for x in (prompt.keys, prompt.values)))
        query = prompt.query[layer]
        expected = prune_score(query, cache, row, length, HEAD_SIZE**-0.5, method, weights[layer])
        found = scores.unflatten(1, (LAYERS, KV_HEADS))[:, layer]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())
        assert torch.equal(kept[layer], select(expected, method, keep))


def test_another_window_is_refused() -> None:
    prompt, weights = _prompt(50)
    with pytest.raises(ValueError, match="^tova: a window of 32, the prompt's has 8 queries$"):
        Scorer(prompt, 1.0, weights).score(parse_method("tova"))
