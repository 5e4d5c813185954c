"""Where values come from: precedence, the reported source, and the spellings that each source takes."""

import json

import pytest

from kvcompile.config import OPTIONS, KVCompileConfig, resolve
from kvcompile.config_sources import environment_name

KEY = "offload.max_scan_reqs"
VARIABLE = "KVCOMPILE_OFFLOAD_MAX_SCAN_REQS"


def _write(tmp_path, text, name="kv.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _env(**variables):
    """One variable of the environment, resolved alone."""
    return resolve(environ=variables).config


@pytest.fixture
def sources(tmp_path):
    """One value from each source for the same key, lowest precedence first: (arguments, value, reported name)."""
    path = _write(tmp_path, "[offload]\nmax_scan_reqs = 12\n")
    return [
        ({}, 3, None),
        ({"base": {KEY: 11}}, 11, None),
        ({"environ": {"KVCOMPILE_CONFIG": path}}, 12, f"file {path}"),
        ({"environ": {VARIABLE: "13"}}, 13, f"environment {VARIABLE}"),
        ({"overrides": {KEY: 14}}, 14, "--additional-config"),
    ]


def _merge(*sources):
    arguments = {"environ": {}}
    for given, _, _ in sources:
        for name, value in given.items():
            arguments[name] = {**arguments.get(name, {}), **value}
    return resolve(**arguments)


@pytest.mark.parametrize("lower", range(4))
def test_of_two_adjacent_sources_the_later_wins(sources, lower):
    resolved = _merge(sources[lower], sources[lower + 1])
    _, value, name = sources[lower + 1]
    assert resolved.config.offload.max_scan_reqs == value
    assert resolved.sources == ({KEY: name} if name else {})


@pytest.mark.parametrize("count", range(1, 6))
def test_of_the_first_sources_together_the_last_wins(sources, count):
    resolved = _merge(*sources[:count])
    assert resolved.config.offload.max_scan_reqs == sources[count - 1][1]


def test_nothing_given_is_the_default_with_no_source():
    resolved = resolve(environ={})
    assert resolved.config == KVCompileConfig()
    assert resolved.sources == {}


def test_what_the_preset_changes_is_a_default_with_no_source():
    resolved = resolve(environ={}, base={"strict": True, "kv8": {"enabled": False}})
    assert resolved.config.strict
    assert not resolved.config.kv8.enabled
    assert resolved.sources == {}


def test_each_source_keeps_the_keys_that_later_ones_leave_alone(tmp_path):
    path = _write(tmp_path, "[prune]\nkeep_ratio = 0.25\nmin_tokens = 600\n")
    resolved = resolve(
        base={"kv8": {"enabled": False}},
        environ={"KVCOMPILE_CONFIG": path, "KVCOMPILE_PRUNE_MIN_TOKENS": "700"},
        overrides={"prune": {"sink_tokens": 8}, "strict": True},
    )
    assert resolved.config.prune.keep_ratio == 0.25
    assert resolved.config.prune.min_tokens == 700
    assert resolved.config.prune.sink_tokens == 8
    assert not resolved.config.kv8.enabled
    assert resolved.sources == {
        "prune.keep_ratio": f"file {path}",
        "prune.min_tokens": "environment KVCOMPILE_PRUNE_MIN_TOKENS",
        "prune.sink_tokens": "--additional-config",
        "strict": "--additional-config",
    }


def test_a_value_equal_to_the_default_still_has_a_source():
    assert resolve(environ={}, overrides={"strict": False}).sources == {"strict": "--additional-config"}


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("KVCOMPILE_STRICT", "yes")
    assert resolve().config.strict


@pytest.mark.parametrize("key", OPTIONS)
def test_every_option_has_a_variable_and_the_variables_differ(key):
    option = OPTIONS[key]
    variable = environment_name(key)
    assert variable == "KVCOMPILE_" + key.replace(".", "_").upper()
    text = "none" if option.default is None else str(option.default)
    resolved = resolve(environ={variable: text})
    assert resolved.config == KVCompileConfig()
    assert resolved.sources == {key: f"environment {variable}"}
    assert len({environment_name(other) for other in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(
    ("text", "value"),
    [(t, True) for t in ("1", "true", "yes", "on", "TRUE", " On ")]
    + [(t, False) for t in ("0", "false", "no", "off", "No")],
)
def test_a_boolean_variable_takes_the_usual_words(text, value):
    assert _env(KVCOMPILE_STRICT=text).strict is value


@pytest.mark.parametrize(("text", "value"), [("600", 600), ("+600", 600), (" 600 ", 600), ("0600", 600)])
def test_an_integer_variable_is_decimal_digits(text, value):
    assert _env(KVCOMPILE_PRUNE_MIN_TOKENS=text).prune.min_tokens == value


@pytest.mark.parametrize(("text", "value"), [("0.25", 0.25), ("1", 1.0), ("2.5e-1", 0.25), (".5", 0.5), ("1.", 1.0)])
def test_a_float_variable_is_a_decimal_number(text, value):
    assert _env(KVCOMPILE_PRUNE_KEEP_RATIO=text).prune.keep_ratio == value


def test_none_unsets_an_optional_value_of_an_earlier_source():
    resolved = resolve(base={"prune.budget_tokens": 512}, environ={"KVCOMPILE_PRUNE_BUDGET_TOKENS": "none"})
    assert resolved.config.prune.budget_tokens is None
    resolved = resolve(environ={"KVCOMPILE_PRUNE_BUDGET_TOKENS": "512"}, overrides={"prune": {"budget_tokens": None}})
    assert resolved.config.prune.budget_tokens is None


SIZES = [
    ("8GiB", 8 << 30),
    ("512MiB", 512 << 20),
    ("2048KiB", 2048 << 10),
    ("1TiB", 1 << 40),
    ("8 GiB", 8 << 30),
    ("8gib", 8 << 30),
    (" 8GiB ", 8 << 30),
]


@pytest.mark.parametrize(("text", "value"), SIZES)
def test_a_size_takes_a_binary_unit_in_every_source(tmp_path, text, value):
    toml = _write(tmp_path, f'[offload]\ncpu_bytes_to_use = "{text}"\n')
    as_json = _write(tmp_path, json.dumps({"offload": {"cpu_bytes_to_use": text}}), "kv.json")
    for arguments in (
        {"environ": {"KVCOMPILE_OFFLOAD_CPU_BYTES_TO_USE": text}},
        {"environ": {"KVCOMPILE_CONFIG": toml}},
        {"environ": {"KVCOMPILE_CONFIG": as_json}},
        {"environ": {}, "overrides": {"offload": {"cpu_bytes_to_use": text}}},
        {"environ": {}, "base": {"offload.cpu_bytes_to_use": text}},
    ):
        assert resolve(**arguments).config.offload.cpu_bytes_to_use == value


def test_a_size_variable_without_a_unit_is_bytes():
    assert _env(KVCOMPILE_OFFLOAD_CPU_BYTES_TO_USE="1048576").offload.cpu_bytes_to_use == 1 << 20


@pytest.mark.parametrize(
    "overrides",
    [
        {"prune": {"keep_ratio": 0.25, "method": "tova"}, "strict": True},
        {"prune.keep_ratio": 0.25, "prune.method": "tova", "strict": True},
        {"prune": {"keep_ratio": 0.25}, "prune.method": "tova", "strict": True},
    ],
)
def test_nested_and_dotted_keys_mean_the_same(overrides):
    config = resolve(environ={}, overrides=overrides).config
    assert (config.prune.keep_ratio, config.prune.method, config.strict) == (0.25, "tova", True)


def test_an_int_is_accepted_for_a_float_in_a_file(tmp_path):
    path = _write(tmp_path, "[prune]\nkeep_ratio = 1\n")
    assert resolve(environ={"KVCOMPILE_CONFIG": path}).config.prune.keep_ratio == 1.0


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv.toml", "strict = true\nkv8.enabled = false\n"),
        ("kv.json", '{"strict": true, "kv8.enabled": false}'),
        ("KV.TOML", "strict = true\r\n[kv8]\r\nenabled = false\r\n"),
        ("KV.Json", '{"strict": true,\n "kv8": {"enabled": false}}'),
    ],
)
def test_a_file_is_toml_or_json_by_its_name(tmp_path, name, text, mark):
    path = _write(tmp_path, mark + text, name)
    config = resolve(environ={"KVCOMPILE_CONFIG": path}).config
    assert config.strict
    assert not config.kv8.enabled


@pytest.mark.parametrize(("name", "text"), [("kv.toml", ""), ("kv.json", "{}"), ("kv.toml", "[prune]\n")])
def test_a_file_that_sets_nothing_is_the_default(tmp_path, name, text):
    resolved = resolve(environ={"KVCOMPILE_CONFIG": _write(tmp_path, text, name)})
    assert resolved.config == KVCompileConfig()
    assert resolved.sources == {}


def test_the_other_name_of_the_budget_is_honoured():
    resolved = resolve(environ={"VLLM_ANDPRO_BUDGET_TOKENS": "512"})
    assert resolved.config.prune.budget_tokens == 512
    assert resolved.sources == {"prune.budget_tokens": "environment VLLM_ANDPRO_BUDGET_TOKENS"}


def test_both_names_of_the_budget_may_agree():
    resolved = resolve(environ={"VLLM_ANDPRO_BUDGET_TOKENS": "0512", "KVCOMPILE_PRUNE_BUDGET_TOKENS": "512"})
    assert resolved.config.prune.budget_tokens == 512
    assert resolved.sources == {"prune.budget_tokens": "environment KVCOMPILE_PRUNE_BUDGET_TOKENS"}


def test_variables_of_others_and_reserved_names_are_left_alone():
    environ = {"VLLM_USE_V1": "1", "PATH": "/bin", "KVCOMPILE_CACHE_DIR": "anything", "KVCOMPILED": "x"}
    assert resolve(environ=environ).sources == {}


def test_the_given_mappings_are_not_changed():
    overrides = {"prune": {"keep_ratio": 1}}
    base = {"kv8": {"enabled": False}}
    environ = {"KVCOMPILE_STRICT": "1"}
    resolve(overrides=overrides, base=base, environ=environ)
    assert overrides == {"prune": {"keep_ratio": 1}}
    assert base == {"kv8": {"enabled": False}}
    assert environ == {"KVCOMPILE_STRICT": "1"}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, False),
        ({"base": {"prune.enabled": True}}, False),
        ({"overrides": {"kv8.enabled": True}}, False),
        ({"overrides": {"prune.enabled": True}}, True),
        ({"environ": {"VLLM_ANDPRO_BUDGET_TOKENS": "512"}}, True),
        ({"environ": {"VLLM_ANDPRO_BUDGET_TOKENS": "512", "KVCOMPILE_PRUNE_ENABLED": "0"}}, False),
    ],
)
def test_a_part_is_asked_for_where_the_user_set_it_or_an_option_of_it_and_it_is_on(given, asked):
    assert resolve(**{"environ": {}, **given}).asks_for("prune") is asked
