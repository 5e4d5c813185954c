"""vLLM's own `--compilation-config` for whoever does not ask for kvcompile, and one line for a mistake of who does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvcompile.integrations.vllm.request import request_of

DEEP = "[" * 3000
LONG = f'{{"mode": {"1" * 5000}}}'


@pytest.fixture
def stock_parser() -> FlexibleArgumentParser:
    """The same without kvcompile's hook."""
    return EngineArgs.add_cli_args.__wrapped__(FlexibleArgumentParser(prog="vllm"))


@pytest.fixture
def error_line(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`error_line(*argv)`: the one line on standard error with which the command line is refused."""

    def refused(*argv: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(list(argv))
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.count("\n") == 1 and error.endswith("\n"), error
        assert error.startswith("kvcompile: error: ")
        return error.rstrip("\n")

    return refused


def _outcome(parser: argparse.ArgumentParser, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command line leads to: the configuration and its hash, or the exit code and all of standard error."""
    capsys.readouterr()
    try:
        config = parser.parse_args(list(argv)).compilation_config
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err
    return config, config.compute_hash(), vars(config).keys()


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("-cc", "{}"),
        ("-cc", '{"mode": 3}'),
        ("-cc", '{"mode": "NONE"}'),
        ("-cc.mode=NONE",),
        ("-cc.mode=3", "-cc.pass_config.eliminate_noops=false"),
        ("-cc", '{"mode": 3}', "-cc", '{"backend": "eager"}'),
        ("-cc.mode=3", "-cc", '{"backend": "eager"}'),
        ("-cc", '{"mode": 3, "mode": 2}'),
        ("-cc", '{"max_cudagraph_capture_size": 1k}'),
        ("-cc", '{"custom_ops": ["+kvcompile"]}'),
        ("--compilation-conf", '{"mode": 3}'),
    ],
    ids=" ".join,
)
def test_without_a_request_the_configuration_is_what_vllm_makes_of_it(parser, stock_parser, capsys, argv):
    ours, stock = (_outcome(p, argv, capsys) for p in (parser, stock_parser))
    assert isinstance(stock[0], CompilationConfig)
    assert ours == stock
    assert repr(ours[0]) == repr(stock[0])


def test_without_a_request_the_last_one_replaces_the_others(parse):
    config = parse("-cc", '{"mode": 3, "backend": "eager"}', "-cc", '{"mode": 2}')
    assert config == CompilationConfig(mode=2)


@pytest.mark.parametrize(
    "argv",
    [
        ("-cc",),
        ("-cc", ""),
        ("-cc", "3"),
        ("-cc", "-1"),
        ("-cc=3",),
        ("-cc", "null"),
        ("-cc", "None"),
        ("-cc", "[]"),
        ("-cc", '"word"'),
        ("-cc", "preset"),
        ("-cc", '{"kvcompil": true}'),
        ("-cc", '{"mode": 99}'),
        ("-cc", '{"mode": NaN}'),
        ("-cc", '{"mode": 1e400}'),
        ("-cc", '{"mode": 3,}'),
        ("-cc", '{"mode": 3} 4'),
        ("-cc", '{"bogus": 1}'),
        ("-cc", '{"pass_config": {"bogus": 1}}'),
        ("-cc.bogus=1",),
        ("-cc", '{"custom_ops": ["all", "none"]}'),
        ("-cc", '{"inductor_passes": {"a": "b"}}'),
        ("-cc", LONG),
        ("-cc", DEEP),
        ("-cc", '{"mode": 3}', "-cc", "word"),
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_without_a_request_an_error_is_the_one_of_vllm_with_its_exit_code(parser, stock_parser, capsys, argv):
    ours, stock = (_outcome(p, argv, capsys) for p in (parser, stock_parser))
    assert stock[0] == 2
    assert "error: argument --compilation-config/-cc: " in stock[1]
    assert ours == stock


@pytest.mark.parametrize("word", ["kvcompil", "kvcomple", "KVCOMPILE", "kv-compile"])
def test_a_word_that_is_nearly_the_presets_is_asked_about(error_line, word):
    assert error_line("-cc", word) == f"kvcompile: error: -cc {word}: did you mean kvcompile?"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("-cc", "kvcompile", "-cc", "3"), ("-cc 3:",)),
        (("-cc", "kvcompile", "--compilation-config", "3"), ("--compilation-config 3:",)),
        (("-cc", "kvcompile", "-cc", "word"), ("-cc word:", "Invalid JSON")),
        (("-cc", "kvcompile", "-cc", "null"), ("-cc null:",)),
        (("-cc", "kvcompile", "-cc", DEEP), ("recursion limit exceeded",)),
        (("-cc", "kvcompile", "-cc", LONG), ("number out of range",)),
        (("-cc", "kvcompile", "-cc.bogus=1"), ('-cc {"bogus": 1}:', "bogus Unexpected keyword argument")),
        (("-cc.bogus=1", "-cc", "kvcompile"), ('-cc {"bogus": 1}:', "bogus Unexpected keyword argument")),
        (("-cc", "kvcompile", "-cc.pass_config.bogus=1"), ("pass_config.bogus Unexpected keyword argument",)),
        (("-cc", "kvcompile", "-cc.mode=99"), ("mode Input should be 0, 1, 2 or 3", "input_value=99")),
        (("-cc", "kvcompile", "-cc.mode=word"), ("Invalid compilation mode: word", "VLLM_COMPILE")),
        (("-cc", '{"kvcompile": true, "bogus": 1}'), ("bogus Unexpected keyword argument",)),
        (("-cc", '{\n  "kvcompile": true,\n  "mode": 99\n}'), ("mode Input should be 0, 1, 2 or 3",)),
        (("-cc", '{"kvcompile": 3}'), ('"kvcompile" is 3', "true or a table", '{"kvcompile": {"kv8"')),
        (("-cc", '{"kvcompile": false}'), ('"kvcompile" is false', "true or a table")),
        (("-cc", "kvcompile", "-cc.kvcompile=off"), ('"kvcompile" is "off"', "true or a table")),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_a_mistake_next_to_a_request_is_one_line_that_names_it(error_line, argv, parts):
    line = error_line(*argv)
    for part in parts:
        assert part in line


def test_a_parser_keeps_nothing_of_a_command_line_that_it_refused(parse, error_line):
    error_line("-cc", "kvcompile", "-cc.mode=0", "-cc.bogus=1")
    plain = parse("-cc.backend=eager")
    assert request_of(plain) is None
    assert plain.mode is None
