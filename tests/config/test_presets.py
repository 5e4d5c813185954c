"""Options of parts that this version does not have are refused by name; switching them off is fine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcompile import presets
from kvcompile.config import SECTIONS, UsageError, resolve
from kvcompile.presets import MODULES, availability, in_this_version, refuse_unavailable


def test_every_section_of_the_configuration_is_a_module() -> None:
    assert {m.name for m in MODULES} == set(SECTIONS)


def test_availability_names_every_module_once() -> None:
    assert [row[0] for row in availability()] == [m.name for m in MODULES]
    assert {row[1] for row in availability()} == {"available"}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without(name)`: as if this version had no such part."""

    def remove(name: str) -> None:
        parts = tuple(replace(m, available=False) if m.name == name else m for m in MODULES)
        monkeypatch.setattr(presets, "MODULES", parts)

    return remove


@pytest.mark.parametrize("name", ["prune", "offload"])
def test_switching_on_a_part_that_is_not_there_is_refused_and_switching_it_off_is_not(
    without: Callable[[str], None], name: str
) -> None:
    without(name)
    assert (name, "not yet") in [row[:2] for row in availability()]
    refuse_unavailable(resolve(overrides={name: {"enabled": False}}, environ={}))
    with pytest.raises(
        UsageError, match=rf"^{name}\.enabled \(from .*\): .* not in this version .* {name}\.enabled=false$"
    ):
        refuse_unavailable(resolve(overrides={name: {"enabled": True}}, environ={}))


def test_any_other_option_of_a_part_that_is_not_there_is_refused(without: Callable[[str], None]) -> None:
    without("offload")
    with pytest.raises(
        UsageError, match=r"^offload\.max_scan_reqs \(from environment KVCOMPILE_OFFLOAD_MAX_SCAN_REQS\): "
    ):
        refuse_unavailable(resolve(environ={"KVCOMPILE_OFFLOAD_MAX_SCAN_REQS": "4"}))


def test_asking_for_a_pass_that_is_not_there_is_refused_and_switching_it_off_is_not(monkeypatch) -> None:
    monkeypatch.setattr(presets, "PASS_NAMES", ("norm_quant", "swiglu_quant"))
    refuse_unavailable(resolve(overrides={"passes": {"attention_swap": False}}, environ={}))
    has = r"no such pass \(it has: norm_quant, swiglu_quant\)"
    with pytest.raises(UsageError, match=rf"^passes\.attention_swap \(from .*{has}"):
        refuse_unavailable(resolve(overrides={"passes": {"attention_swap": True}}, environ={}))


def test_defaults_and_options_of_parts_that_are_there_pass() -> None:
    refuse_unavailable(resolve(environ={}))
    refuse_unavailable(resolve(overrides={"kv8": {"enabled": True}, "strict": True}, environ={}))
    refuse_unavailable(resolve(overrides={"passes": {"norm_quant": True, "swiglu_quant": False}}, environ={}))


def test_only_options_of_parts_that_are_there_are_in_this_version(without: Callable[[str], None]) -> None:
    without("offload")
    assert in_this_version("kv8.enabled")
    assert in_this_version("strict")
    assert in_this_version("prune.keep_ratio")
    assert not in_this_version("offload.max_scan_reqs")
    assert all(in_this_version(f"passes.{name}") for name in ("norm_quant", "swiglu_quant", "rotary", "attention_swap"))
    assert not in_this_version("passes.another")
