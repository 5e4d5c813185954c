"""What comes out of a configuration: plain values that read back the same, and a fingerprint of all of them."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import pytest

from kvcompile.config import OPTIONS, SECTIONS, KVCompileConfig, fingerprint, resolve, to_dict


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


@pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))
def test_the_fingerprint_changes_with_every_option(option):
    assert fingerprint(_with(option.key, _another(option))) != fingerprint(KVCompileConfig())


def test_the_fingerprints_of_all_single_changes_differ():
    prints = {fingerprint(_with(option.key, _another(option))) for option in OPTIONS.values()}
    assert len(prints) == len(OPTIONS)


def test_equal_configurations_have_equal_fingerprints():
    assert fingerprint(_with("prune.keep_ratio", 1)) == fingerprint(_with("prune.keep_ratio", 1.0))
    trigger = "offload.lazy_gpu_free_trigger"
    assert fingerprint(_with(trigger, -0.0)) == fingerprint(_with(trigger, 0))


def test_the_fingerprint_is_the_same_in_another_process():
    code = "from kvcompile.config import KVCompileConfig, fingerprint; print(fingerprint(KVCompileConfig()))"
    environ = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == fingerprint(KVCompileConfig())


def test_the_fingerprint_is_the_sha256_of_the_canonical_json():
    canonical = json.dumps(to_dict(KVCompileConfig()), sort_keys=True, separators=(",", ":"))
    assert fingerprint(KVCompileConfig()) == hashlib.sha256(canonical.encode()).hexdigest()
