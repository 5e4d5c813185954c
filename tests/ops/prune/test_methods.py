"""The registry of pruning methods: names, defaults, and one line for everything that does not exist."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from kvcompile.ops.prune import METHODS, Stage, cpu, cuda, parse_method

NAMES = "andpro, snapkv, tova, streaming, critical, random, blend, keydiff, robust"


def test_the_methods_are_these_and_each_is_found_by_its_name() -> None:
    assert list(METHODS) == NAMES.split(", ")
    for name in METHODS:
        method = parse_method(name)
        assert name == method.NAME
        assert (method.window, method.sink, method.always_kept) == (32, 4, 36)


def test_the_defaults_are_those_of_the_design() -> None:
    andpro, blend, critical = (parse_method(name) for name in ("andpro", "blend", "critical"))
    assert (andpro.kernel, andpro.chunk) == (7, 4)
    assert andpro.stages == (Stage(chunk=4, reduce="sum"),)
    assert blend.stages == (Stage(share=0.5, chunk=4, reduce="sum"), Stage(chunk=4, reduce="max"))
    *whole, last = parse_method("robust").stages
    assert whole == [Stage(share=0.3, chunk=4, reduce="sum"), Stage(share=0.5, chunk=4, reduce="max")]
    assert last == Stage(chunk=4, reduce="sum")
    assert critical.stages == (Stage(share=0.5), Stage())
    assert parse_method("snapkv").kernel == 7
    assert parse_method("random").seed == 0


def test_each_docstring_names_its_paper() -> None:
    venues = {
        "andpro": "NeurIPS 2025",
        "snapkv": "NeurIPS 2024",
        "tova": "EMNLP 2024",
        "streaming": "ICLR 2024",
        "critical": "arXiv:2502.03805",
        "keydiff": "arXiv:2504.15364",
    }
    for name, venue in venues.items():
        assert venue in METHODS[name].__doc__


def test_a_method_is_a_value() -> None:
    assert parse_method("blend", anchor=0.3) == parse_method("blend", anchor=0.3) != parse_method("blend")
    with pytest.raises(FrozenInstanceError):
        parse_method("tova").window = 3


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "h2o",
            {},
            f"pruning method: given 'h2o', allowed {NAMES}",
        ),
        ("tova", {"kernel": 7}, "tova: given the parameter 'kernel', allowed window, sink"),
        ("andpro", {"kernel": 4}, "andpro: kernel: given 4, allowed an odd whole number from 1"),
        ("andpro", {"chunk": 0}, "andpro: chunk: given 0, allowed a whole number from 1"),
        ("andpro", {"chunk": True}, "andpro: chunk: given True, allowed a whole number from 1"),
        ("snapkv", {"window": 0}, "snapkv: window: given 0, allowed a whole number from 1"),
        ("snapkv", {"window": 32.0}, "snapkv: window: given 32.0, allowed a whole number from 1"),
        ("tova", {"sink": -1}, "tova: sink: given -1, allowed a whole number from 0"),
        ("blend", {"anchor": 1.5}, "blend: anchor: given 1.5, allowed a number from 0 to 1"),
        ("blend", {"anchor": float("nan")}, "blend: anchor: given nan, allowed a number from 0 to 1"),
        ("robust", {"anchor": 0.6, "last": 0.5}, "robust: anchor + last: given 0.6 + 0.5, allowed at most 1"),
        ("critical", {"first_stage": "half"}, "critical: first_stage: given 'half', allowed a number from 0 to 1"),
        ("critical", {"epsilon": -1.0}, "critical: epsilon: given -1.0, allowed a finite number from 0"),
        ("random", {"seed": 2**32}, "random: seed: given 4294967296, allowed a whole number from 0 to 4294967295"),
    ],
)
def test_what_does_not_exist_is_said_in_one_line(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_method(name, **parameters)
    assert str(error.value) == message


class _Rows:
    """In the place of the kernels over a layer: each gives zeros."""

    def __init__(self, *arguments: Any) -> None:
        """Of a layer that is not looked at."""

    def anchored(self, scores: torch.Tensor, reach: int, last: bool, pool_last: bool) -> torch.Tensor | None:
        scores.zero_()
        return torch.zeros(()) if last else None

    def means(self) -> torch.Tensor:
        return torch.zeros(())

    key_difference = means

    def mean_heads(self, means: torch.Tensor, scores: torch.Tensor) -> None:
        scores.zero_()

    def pool_means(self, means: torch.Tensor, reach: int, scores: torch.Tensor) -> None:
        scores.zero_()


def test_every_method_has_scores_on_cuda_and_what_has_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_Observation", _Rows)
    monkeypatch.setattr(cuda, "projected_norm", lambda *_: torch.zeros(()))
    query, cache = torch.zeros(4, 2, 64, dtype=torch.float16), torch.zeros(2, 2, 16, 1, 68, dtype=torch.int8)

    def scored(module: Any, name: str) -> torch.Tensor:
        row = torch.arange(2, dtype=torch.int32)
        return module.score(query, cache, row, 32, 0.125, name, 4, 7, 1e-4, 0, None)

    for name, method in METHODS.items():
        scores = scored(cuda, name)
        # Every stage was written to, and none is that of another method's branch.
        assert scores.shape == (len(parse_method(name).stages), 1, 32) and bool(scores.isfinite().all()), method
    monkeypatch.setitem(METHODS, "nearest", METHODS["snapkv"])
    for module in (cuda, cpu):
        with pytest.raises(ValueError, match="prune_score: method: given 'nearest', of which there are no scores on"):
            scored(module, "nearest")
