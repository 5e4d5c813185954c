"""The registry of pruning methods: names, defaults, and one line for everything that does not exist."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from kvcompile.ops.prune import METHODS, Stage, parse_method

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
