"""A user's mistakes, source by source: each is one line that names the source, the key and what to do."""

import json

import pytest

from kvcompile.config import UsageError, resolve
from kvcompile.config_sources import ALIASES, RESERVED


def _write(tmp_path, content, name="kv.toml"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def _error(**arguments):
    arguments.setdefault("environ", {})
    with pytest.raises(UsageError) as caught:
        resolve(**arguments)
    message = str(caught.value)
    assert message.isprintable(), message
    return message


def _file_error(path):
    return _error(environ={"KVCOMPILE_CONFIG": path})


@pytest.mark.parametrize(
    ("table", "tail"),
    [
        ({"prune": {"keep_ration": 0.5}}, "unknown key 'prune.keep_ration': did you mean prune.keep_ratio?"),
        ({"prune.keep_ration": 0.5}, "unknown key 'prune.keep_ration': did you mean prune.keep_ratio?"),
        ({"keep_ratio": 0.5}, "unknown key 'keep_ratio': did you mean prune.keep_ratio?"),
        ({"prunes": {"keep_ratio": 0.5}}, "unknown key 'prunes': did you mean prune?"),
        ({"STRICT": True}, "unknown key 'STRICT': did you mean strict?"),
        ({"PRUNE.KEEP_RATIO": 1}, "unknown key 'PRUNE.KEEP_RATIO': did you mean prune.keep_ratio?"),
        ({"offload": {"enable": True}}, "unknown key 'offload.enable': did you mean offload.enabled?"),
        ({"prune": {"max_scan_reqs": 1}}, "unknown key 'prune.max_scan_reqs': did you mean offload.max_scan_reqs?"),
        ({"prune": {"a.b\n": 1}}, r"unknown key 'prune.a.b\n': allowed in prune are enabled, method, "),
        ({"prune": {"zzzzzzzzzzzz": 1}}, "unknown key 'prune.zzzzzzzzzzzz': allowed in prune are enabled, method, "),
        ({"kv8": {"": 1}}, "unknown key 'kv8.': did you mean kv8?"),
        ({"zzz": 1}, "unknown key 'zzz': allowed are kv8, linear, passes, prune, scheduler, offload, strict"),
        ({"": 1}, "unknown key '': allowed are kv8, "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_or_the_allowed_ones(tmp_path, table, tail):
    assert _error(overrides=table).startswith(f"--additional-config: {tail}")
    assert _error(base=table).startswith(f"built-in preset: {tail}")
    path = _write(tmp_path, json.dumps(table), "kv.json")
    assert _file_error(path).startswith(f"file {path}: {tail}")


def test_an_unknown_key_of_toml_is_named(tmp_path):
    path = _write(tmp_path, "[offload]\ncpu_bytes = 1\n")
    assert _file_error(path) == (
        f"file {path}: unknown key 'offload.cpu_bytes': did you mean offload.cpu_bytes_to_use?"
    )


def test_a_key_that_is_not_text_is_refused():
    assert _error(overrides={1: True}).startswith("--additional-config: unknown key 1: allowed are kv8, ")
    assert _error(overrides={"prune": {None: 1}}).startswith("--additional-config: unknown key 'prune.None': ")


@pytest.mark.parametrize(
    ("variable", "tail"),
    [
        ("KVCOMPILE_KV8_ENABLE", "did you mean KVCOMPILE_KV8_ENABLED?"),
        ("KVCOMPILE_PRUNE_RATIO", "did you mean KVCOMPILE_PRUNE_KEEP_RATIO?"),
        ("KVCOMPILE_CONFIGS", "did you mean KVCOMPILE_CONFIG?"),
        ("KVCOMPILE_prune_method", "did you mean KVCOMPILE_PRUNE_METHOD?"),
        ("KVCOMPILE_@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@", "allowed are KVCOMPILE_CONFIG, KVCOMPILE_CACHE_DIR, "),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_or_the_allowed_ones(variable, tail):
    assert _error(environ={variable: "1"}).startswith(f"environment: unknown variable {variable!r}: {tail}")


@pytest.mark.parametrize(
    ("variable", "text", "shown"),
    [
        ("KVCOMPILE_STRICT", "maybe", "strict is 'maybe': give one of 1, true, yes, on, 0, false, no, off, or"),
        ("KVCOMPILE_STRICT", "", "strict is '': give one of"),
        ("KVCOMPILE_STRICT", "none", "strict is 'none': give one of"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "", "prune.min_tokens is '': give a whole number, 17 <= value"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "1_000", "prune.min_tokens is '1_000': give a whole number"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "600.0", "prune.min_tokens is '600.0': give a whole number"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "٦٠٠", "prune.min_tokens is '٦٠٠': give a whole number"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "9" * 5000, "prune.min_tokens is '999"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "none", "prune.min_tokens is 'none': give a whole number"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "-1", "prune.min_tokens is -1: give a whole number"),
        ("KVCOMPILE_PRUNE_MIN_TOKENS", "8GiB", "prune.min_tokens is '8GiB': give a whole number"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "half", "prune.keep_ratio is 'half': give a number, 0 < value <= 1"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "nan", "prune.keep_ratio is nan: give a number, 0 < value <= 1"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "inf", "prune.keep_ratio is inf: give a number"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "1e999", "prune.keep_ratio is inf: give a number"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "٠.٥", "prune.keep_ratio is '٠.٥': give a number"),
        ("KVCOMPILE_PRUNE_KEEP_RATIO", "0_1", "prune.keep_ratio is '0_1': give a number"),
        ("KVCOMPILE_PRUNE_METHOD", "h2o", "prune.method is 'h2o': give one of robust, andpro, snapkv, tova, "),
        ("KVCOMPILE_OFFLOAD_CPU_BYTES_TO_USE", "8GB", "offload.cpu_bytes_to_use is '8GB': give bytes as a whole"),
        ("KVCOMPILE_OFFLOAD_CPU_BYTES_TO_USE", "1.5GiB", "offload.cpu_bytes_to_use is '1.5GiB': give bytes"),
        ("KVCOMPILE_OFFLOAD_CPU_BYTES_TO_USE", "8", "offload.cpu_bytes_to_use is 8: give bytes as a whole number"),
        ("VLLM_ANDPRO_BUDGET_TOKENS", "many", "prune.budget_tokens is 'many': give a whole number"),
    ],
)
def test_a_variable_that_does_not_hold_a_value_is_named(variable, text, shown):
    message = _error(environ={variable: text})
    assert message.startswith(f"environment {variable}: {shown}")
    assert "leave it out for the default " in message


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ({"prune": {"min_tokens": True}}, "prune.min_tokens is true: give a whole number"),
        ({"prune": {"keep_ratio": "0.5"}}, "prune.keep_ratio is '0.5' (a string): give a number"),
        ({"prune": {"budget_tokens": "none"}}, "prune.budget_tokens is 'none' (a string): give a whole number"),
        ({"prune": {"budget_tokens": {"a": 1}}}, "prune.budget_tokens is {'a': 1}: give a whole number"),
        ({"strict": "true"}, "strict is 'true' (a string): give true or false"),
        ({"strict": {"enabled": True}}, "strict is {'enabled': True}: give true or false"),
        ({"prune": {"method": None}}, "prune.method is none: give one of robust"),
        ({"offload": {"cpu_bytes_to_use": "8589934592"}}, "offload.cpu_bytes_to_use is '8589934592' (a string): give"),
        ({"offload": {"cpu_bytes_to_use": "8GB"}}, "offload.cpu_bytes_to_use is '8GB' (a string): give bytes as"),
        ({"offload": {"cpu_bytes_to_use": "9" * 5000 + "GiB"}}, "offload.cpu_bytes_to_use is '999"),
        ({"offload": {"cpu_bytes_to_use": "1KiB"}}, "offload.cpu_bytes_to_use is 1024: give bytes as"),
        ({"offload": {"cpu_bytes_to_use": 4e9}}, "offload.cpu_bytes_to_use is 4000000000.0: give bytes as"),
        ({"prune": {"keep_ratio": float("nan")}}, "prune.keep_ratio is nan: give a number"),
        ({"prune": {"keep_ratio": float("inf")}}, "prune.keep_ratio is inf: give a number"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_not_coerced(tmp_path, table, shown):
    assert _error(overrides=table).startswith(f"--additional-config: {shown}")
    path = _write(tmp_path, json.dumps(table), "kv.json")
    assert _file_error(path).startswith(f"file {path}: {shown}")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("prune.keep_ratio = nan", "prune.keep_ratio is nan: give a number"),
        ("prune.min_tokens = 6e2", "prune.min_tokens is 600.0: give a whole number"),
        ("prune.min_tokens = 1979-05-27", "prune.min_tokens is datetime.date(1979, 5, 27): give a whole number"),
        ("prune.min_tokens = 0x" + "f" * 5000, "prune.min_tokens is a number of over 4000 digits: give a whole"),
        ("prune = []", "prune is []: give a table of options, such as prune.enabled"),
    ],
)
def test_a_toml_value_of_the_wrong_type_or_range_is_not_coerced(tmp_path, line, shown):
    path = _write(tmp_path, line)
    assert _file_error(path).startswith(f"file {path}: {shown}")


def test_a_bad_value_is_an_error_even_when_a_later_source_replaces_it():
    message = _error(environ={"KVCOMPILE_PRUNE_KEEP_RATIO": "7"}, overrides={"prune.keep_ratio": 0.5})
    assert message.startswith("environment KVCOMPILE_PRUNE_KEEP_RATIO: prune.keep_ratio is 7.0: ")


def test_values_that_disagree_across_sources_name_each_source(tmp_path):
    path = _write(tmp_path, "[prune]\nmin_tokens = 64\n")
    message = _error(environ={"KVCOMPILE_CONFIG": path}, overrides={"prune": {"window_tokens": 64}, "strict": True})
    assert message == (
        "prune.min_tokens is 64, less than prune.sink_tokens + prune.window_tokens + a block: 84 with 16, 100 with 32, "
        "132 with 64, 196 with 128 tokens a block: "
        "give prune.min_tokens at least that, or lower prune.window_tokens or prune.sink_tokens "
        f"(prune.min_tokens is from file {path}; prune.window_tokens is from --additional-config)"
    )


def test_a_value_that_disagrees_with_defaults_names_its_source():
    message = _error(overrides={"prune": {"window_tokens": 1024}})
    assert message.startswith("prune.min_tokens is 544, less than ")
    assert message.endswith("(prune.window_tokens is from --additional-config)")


def test_a_value_that_disagrees_with_the_preset_names_it():
    message = _error(base={"prune.window_tokens": 1024})
    assert message.endswith("(prune.window_tokens is from built-in preset)")


@pytest.mark.parametrize("value", [True, None, [], "on", 1])
def test_a_section_that_is_not_a_table_is_refused(value):
    message = _error(overrides={"prune": value})
    assert message.startswith("--additional-config: prune is ")
    assert message.endswith(": give a table of options, such as prune.enabled")


@pytest.mark.parametrize(("text", "shown"), [("[]", "[]"), ("1", "1"), ("null", "none"), ('"a"', "'a'")])
def test_a_top_level_that_is_not_a_table_is_refused(tmp_path, text, shown):
    tail = f"the top level is {shown}: give a table of kv8, linear, passes, prune, scheduler, offload, strict"
    path = _write(tmp_path, text, "kv.json")
    assert _file_error(path) == f"file {path}: {tail}"
    value = json.loads(text)
    if value is not None:
        assert _error(overrides=value) == f"--additional-config: {tail}"
        assert _error(base=value) == f"built-in preset: {tail}"


@pytest.mark.parametrize("second", [0.25, 0.5])
def test_one_key_nested_and_dotted_in_one_source_is_refused(tmp_path, second):
    table = {"prune": {"keep_ratio": 0.5}, "prune.keep_ratio": second}
    tail = "prune.keep_ratio is given twice, nested and dotted: keep one of the two"
    assert _error(overrides=table) == f"--additional-config: {tail}"
    assert _error(base=dict(reversed(table.items()))) == f"built-in preset: {tail}"
    as_json = _write(tmp_path, json.dumps(table), "kv.json")
    assert _file_error(as_json) == f"file {as_json}: {tail}"
    toml = _write(tmp_path, f'"prune.keep_ratio" = {second}\n[prune]\nkeep_ratio = 0.5\n')
    assert _file_error(toml) == f"file {toml}: {tail}"


@pytest.mark.parametrize("text", ['{"prune": {}, "prune": {}}', '{"kv8": 1, "prune": 0, "prune": 0}'])
def test_one_json_key_written_twice_is_refused(tmp_path, text):
    path = _write(tmp_path, text, "kv.json")
    assert _file_error(path) == f"file {path}: 'prune' is given twice in one table: keep one of the two"


def test_one_toml_key_written_twice_is_refused_with_its_line(tmp_path):
    path = _write(tmp_path, "strict = true\nstrict = true\n")
    assert _file_error(path).startswith(f"file {path}, line 2: ")


def test_two_names_of_the_budget_that_differ_are_refused():
    message = _error(environ={"VLLM_ANDPRO_BUDGET_TOKENS": "256", "KVCOMPILE_PRUNE_BUDGET_TOKENS": "none"})
    assert message == (
        "environment: KVCOMPILE_PRUNE_BUDGET_TOKENS is none but VLLM_ANDPRO_BUDGET_TOKENS, another name of "
        "prune.budget_tokens, is 256: set one of the two"
    )


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("kv.toml", "strict = true\n[prune\n", 2),
        ("kv.toml", "\n\nstrict = yes\n", 3),
        ("kv.toml", "strict = true\nkv8 = {\n", 2),
        ("kv.toml", 'strict = true\na = """\n\n', 3),
        ("kv.json", '{\n "strict": True\n}', 2),
        ("kv.json", "", 1),
        ("kv.json", '{"strict": true,\n\n}', 3),
        ("kv.json", '{"strict": true}\n{}', 2),
        ("kv.toml", b"strict = true\n# \xff\n", 2),
        ("kv.json", b"{\n\n\xff}", 3),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, text, line):
    path = _write(tmp_path, text, name)
    message = _file_error(path)
    assert message.startswith(f"file {path}, line {line}: "), message
    assert message.endswith("correct the file" if isinstance(text, str) else "save the file as UTF-8"), message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv.json", "[" * 100_000),
        ("kv.toml", "a = " + "[" * 100_000),
        ("kv.json", '{"strict": ' + "9" * 5000 + "}"),
        ("kv.toml", "strict = " + "9" * 5000),
    ],
)
def test_a_file_that_the_parser_gives_up_on_is_named(tmp_path, name, text):
    path = _write(tmp_path, text, name)
    message = _file_error(path)
    assert message.startswith(f"file {path}: cannot be parsed ("), message
    assert message.endswith("): correct the file"), message


def test_a_missing_file_is_named(tmp_path):
    path = str(tmp_path / "absent.toml")
    assert _file_error(path) == (
        f"file {path}: cannot be read (No such file or directory): correct KVCOMPILE_CONFIG or the file's permissions"
    )


@pytest.mark.parametrize("name", ["folder.toml", "folder.json"])
def test_a_folder_is_not_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    assert "cannot be read (Is a directory)" in _file_error(str(tmp_path / name))


def test_a_path_that_the_system_refuses_is_named():
    assert _file_error("kv\0.toml").startswith(r"file 'kv\x00.toml': cannot be read (")


@pytest.mark.parametrize("name", ["kv.yaml", "kv", "kv.toml.bak", ".toml", "", " "])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    path = str(tmp_path / name) if name.strip() else name
    if name.strip():
        _write(tmp_path, "strict = true\n", name)
    message = _file_error(path)
    assert message.startswith("environment KVCOMPILE_CONFIG: ")
    assert message.endswith(": name a .toml or .json file, or unset the variable")


def test_the_reserved_names_and_aliases_are_those_documented():
    assert RESERVED == ("KVCOMPILE_CONFIG", "KVCOMPILE_CACHE_DIR")
    assert ALIASES == {"VLLM_ANDPRO_BUDGET_TOKENS": "prune.budget_tokens"}
