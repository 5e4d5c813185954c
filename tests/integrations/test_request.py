"""Every way of asking for kvcompile on the command line, and what of it travels with the configuration."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from kvcompile.integrations.vllm.request import CompilationConfigAction, Request, request_of


@pytest.mark.parametrize(
    "argv",
    [
        ("--compilation-config", "kvcompile"),
        ("--compilation-config=kvcompile",),
        ("--compilation_config", "kvcompile"),
        ("--compilation_config=kvcompile",),
        ("-cc", "kvcompile"),
        ("-cc=kvcompile",),
        ("-cc", " kvcompile "),
        ("-cc", '"kvcompile"'),
        ("-cc", "'kvcompile'"),
        ("-cc", '{"kvcompile": true}'),
        ("-cc", '{"kvcompile": {}}'),
        ("-cc.kvcompile=true",),
        ("-cc.kvcompile", "true"),
        ("--compilation-config.kvcompile=true",),
        ("-cc", "kvcompile", "-cc", "kvcompile"),
        ("-cc", "{}", "-cc", "kvcompile", "-cc", "{}"),
    ],
    ids=" ".join,
)
def test_every_spelling_asks_for_kvcompile_and_nothing_else(parse, argv):
    config = parse(*argv)
    assert isinstance(config, CompilationConfig)
    assert request_of(config) == Request({}, {})
    assert config == CompilationConfig()


@pytest.mark.parametrize("value", ["kvcompil", "KVCOMPILE", "kv compile", "", "3"])
def test_another_word_does_not_ask(value):
    assert request_of(value) is None


@pytest.mark.parametrize("value", [None, 3, CompilationConfig(), {"kvcompile": True}], ids=repr)
def test_a_configuration_that_nobody_marked_does_not_ask(value):
    assert request_of(value) is None


@pytest.mark.parametrize(
    "argv",
    [
        ("-cc", "kvcompile", "-cc.mode=0"),
        ("-cc.mode=0", "-cc", "kvcompile"),
        ("-cc", "kvcompile", "-cc.mode", "0"),
        ("-cc", "kvcompile", "-cc", '{"mode": 0}'),
        ("-cc", '{"mode": 0}', "-cc", "kvcompile"),
        ("-cc", '{"kvcompile": true, "mode": 0}'),
        ("-cc", '{"mode": 0}', "-cc.kvcompile=true"),
        ("--compilation-config=kvcompile", "--compilation-config.mode=0"),
        ("--compilation_config", "kvcompile", "--compilation_config.mode=0"),
        ("-cc", "kvcompile", "--compilation-config.mode=0"),
        ("-cc", '{"mode": 3}', "-cc", "kvcompile", "-cc.mode=0"),
        ("-cc", "kvcompile", "-cc", '{"mode": 3}', "-cc", '{"mode": 0}'),
    ],
    ids=" ".join,
)
def test_a_field_of_vllm_joins_the_request_before_or_after_it_and_the_later_one_wins(parse, argv):
    config = parse(*argv)
    assert request_of(config) == Request({"mode": 0}, {})
    assert config.mode is CompilationMode.NONE


def test_fields_of_all_forms_merge_key_by_key_and_table_by_table(parse):
    config = parse(
        *("-cc", '{"mode": 2, "pass_config": {"fuse_norm_quant": true, "fuse_act_quant": true}}'),
        *("--compilation-config", "kvcompile"),
        *("-cc", '{"mode": 3, "pass_config": {"fuse_act_quant": false}, "custom_ops": ["none"]}'),
        "-cc.cudagraph_mode=PIECEWISE",
        "-cc.pass_config.eliminate_noops=false",
        "-cc.custom_ops+=+rms_norm,+silu_and_mul",
    )
    assert request_of(config).fields == {
        "mode": 3,
        "pass_config": {"fuse_norm_quant": True, "fuse_act_quant": False, "eliminate_noops": False},
        "custom_ops": ["+rms_norm", "+silu_and_mul"],
        "cudagraph_mode": "PIECEWISE",
    }
    assert config.mode is CompilationMode.VLLM_COMPILE
    assert config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert (config.pass_config.fuse_norm_quant, config.pass_config.fuse_act_quant) == (True, False)
    assert config.pass_config.eliminate_noops is False
    assert config.custom_ops == ["+rms_norm", "+silu_and_mul"]


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (("-cc.kvcompile.kv8.enabled=false",), {"kv8": {"enabled": False}}),
        (("-cc", "kvcompile", "-cc.kvcompile.kv8.enabled=false"), {"kv8": {"enabled": False}}),
        (("-cc.kvcompile.kv8.enabled=false", "-cc", "kvcompile"), {"kv8": {"enabled": False}}),
        (("-cc", '{"kvcompile": {"kv8": {"enabled": false}}}'), {"kv8": {"enabled": False}}),
        (("-cc", '{"kvcompile": {"kv8.enabled": false}}'), {"kv8.enabled": False}),
        (
            ("-cc", '{"kvcompile": {"strict": true, "kv8": {"enabled": true}}}', "-cc.kvcompile.kv8.enabled=false"),
            {"strict": True, "kv8": {"enabled": False}},
        ),
        (
            ("-cc", '{"kvcompile": {"strict": true}}', "-cc", '{"kvcompile": {"strict": false}, "mode": 3}'),
            {"strict": False},
        ),
        (("-cc", '{"kvcompile": {"strict": true}}', "-cc", '{"kvcompile": true}'), {"strict": True}),
        (("-cc", '{"kvcompile": {"offload": {"max_scan_reqs": 1k}}}'), {"offload": {"max_scan_reqs": 1000}}),
        (("-cc.kvcompile.offload.cpu_bytes_to_use=2G",), {"offload": {"cpu_bytes_to_use": 2 << 30}}),
        (("-cc.kvcompile.offload.cpu_bytes_to_use=8GiB",), {"offload": {"cpu_bytes_to_use": "8GiB"}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_kvcompile_travel_with_the_request_and_apart_from_the_fields_of_vllm(parse, argv, options):
    request = request_of(parse(*argv))
    assert request.options == options
    assert "kvcompile" not in request.fields


@pytest.mark.parametrize(
    "argv",
    [
        ("-cc", "kvcompile", "-cc", '{"max_cudagraph_capture_size": 1k}'),
        ("-cc", '{"kvcompile": true, "max_cudagraph_capture_size": 1k}'),
        ("-cc", "kvcompile", "-cc.max_cudagraph_capture_size=1k"),
    ],
    ids=" ".join,
)
def test_human_readable_numbers_are_read_as_vllm_reads_them(parse, argv):
    config = parse(*argv)
    assert request_of(config).fields == {"max_cudagraph_capture_size": 1000}
    assert config.max_cudagraph_capture_size == 1000


@pytest.mark.parametrize(
    ("yaml", "request_"),
    [
        ("compilation-config: kvcompile\n", Request({}, {})),
        ("compilation_config: kvcompile\n", Request({}, {})),
        ("compilation-config: 'kvcompile'\n", Request({}, {})),
        ("compilation-config:\n  kvcompile: true\n  mode: 2\n", Request({"mode": 2}, {})),
        (
            "compilation-config: {kvcompile: {kv8: {enabled: false}}, pass_config: {eliminate_noops: no}}\n",
            Request({"pass_config": {"eliminate_noops": False}}, {"kv8": {"enabled": False}}),
        ),
    ],
)
def test_a_yaml_file_asks_with_a_word_or_with_a_table(parse, tmp_path, yaml, request_):
    (tmp_path / "serve.yaml").write_text(yaml)
    assert request_of(parse("--config", str(tmp_path / "serve.yaml"))) == request_


def test_the_command_line_is_laid_over_the_yaml_file(parse, tmp_path):
    (tmp_path / "serve.yaml").write_text(
        "compilation-config:\n  kvcompile:\n    strict: true\n  mode: 2\n  backend: eager\n"
    )
    argv = ("--config", str(tmp_path / "serve.yaml"), "-cc.mode=3", "-cc.kvcompile.kv8.enabled=false")
    assert request_of(parse(*argv)) == Request(
        {"mode": 3, "backend": "eager"}, {"strict": True, "kv8": {"enabled": False}}
    )


def test_engine_arguments_keep_the_request(parser, llama):
    argv = ["--model", str(llama), "-cc", "kvcompile", "-cc.mode=0", "-cc.kvcompile.strict=true"]
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    assert request_of(args.compilation_config) == Request({"mode": 0}, {"strict": True})


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "copy", "pickle"]
)
def test_a_copy_of_a_marked_configuration_still_asks(parse, copied):
    config = copied(parse("-cc", "kvcompile", "-cc.mode=0", "-cc.kvcompile.strict=true"))
    assert request_of(config) == Request({"mode": 0}, {"strict": True})
    assert config.mode is CompilationMode.NONE


def test_the_mark_is_no_field_of_the_configuration(parse):
    marked, plain = parse("-cc", "kvcompile", "-cc.mode=0"), CompilationConfig(mode=0)
    assert marked == plain
    assert marked.compute_hash() == plain.compute_hash()
    assert repr(marked) == repr(plain)


def test_a_parser_used_again_keeps_nothing_of_the_command_line_before(parse):
    first = parse("-cc", "kvcompile", "-cc.mode=0", "-cc.kvcompile.strict=true")
    assert request_of(parse()) is None
    assert parse() == CompilationConfig()
    second = parse("-cc.backend=eager")
    assert request_of(second) is None
    assert (second.mode, second.backend) == (None, "eager")
    assert request_of(parse("-cc", "kvcompile")) == Request({}, {})
    assert request_of(first) == Request({"mode": 0}, {"strict": True})


def test_installing_twice_changes_nothing_more(parser):
    action = parser._option_string_actions["-cc"]
    before = dict(vars(action))
    CompilationConfigAction.install(parser)
    assert type(action) is CompilationConfigAction
    assert vars(action) == before


def test_the_fields_that_a_request_holds_are_plain_json(parse):
    argv = ("-cc", '{"kvcompile": {"strict": true}, "pass_config": {"fuse_norm_quant": true}}', "-cc.mode=3")
    request = request_of(parse(*argv))
    assert json.loads(json.dumps([request.fields, request.options])) == [request.fields, request.options]


def test_a_request_made_in_python_builds_the_same_configuration_as_the_command_line(parse):
    made = Request({"mode": 0, "pass_config": {"eliminate_noops": False}}, {"strict": True}).compilation_config()
    parsed = parse("-cc.kvcompile.strict=true", "-cc.mode=0", "-cc.pass_config.eliminate_noops=false")
    assert made == parsed
    assert request_of(made) == request_of(parsed)
