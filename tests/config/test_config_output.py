"""What comes out of a configuration: plain values that read back the same."""

import dataclasses
import json

import pytest

from kvcompile.config import OPTIONS, SECTIONS, KVCompileConfig, resolve, to_dict


def _another(option):
    """Another valid value of an option, near its default."""
    if option.kind is bool:
        return not option.default
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.kind is float:
        return option.default + 2**-40
    return 4096 if option.default is None else option.default + 1


def _with(key, value):
    return resolve(environ={}, overrides={key: value}).config


def test_the_dictionary_is_nested_plain_values():
    plain = to_dict(KVCompileConfig())
    assert list(plain) == [*SECTIONS, "strict"]
    for key, option in OPTIONS.items():
        section, _, name = key.rpartition(".")
        assert (plain[section] if section else plain)[name] == option.default
    assert json.loads(json.dumps(plain)) == plain


def test_the_dictionary_covers_every_field_of_every_dataclass():
    fields = [f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
    assert [*fields, "strict"] == list(OPTIONS)
    assert {f.name for f in dataclasses.fields(KVCompileConfig)} == {*SECTIONS, "strict"}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))
def test_a_changed_option_survives_the_round_trip_through_json(option):
    config = _with(option.key, _another(option))
    assert config != KVCompileConfig()
    assert resolve(environ={}, overrides=to_dict(config)).config == config
    assert resolve(environ={}, overrides=json.loads(json.dumps(to_dict(config)))).config == config


def test_the_dictionary_is_a_copy():
    config = KVCompileConfig()
    to_dict(config)["prune"]["keep_ratio"] = 7
    assert to_dict(config)["prune"]["keep_ratio"] == 0.5
