"""The `kvcompile` command line: exit codes, what is imported, and where messages go."""

import re
import subprocess
import sys
import types
from importlib.metadata import version

import pytest

from kvcompile import cli
from kvcompile.arguments import Parser
from kvcompile.config import UsageError


def _tool(monkeypatch, run, name="smollm2"):
    """Replace a subcommand's module by one with a single option and the given `run`."""
    module = types.ModuleType(f"kvcompile.tools.{name}")
    module.add_arguments = lambda parser: parser.add_argument("--count", type=int, default=0)
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _raise(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize("code", [0, 1])
def test_the_subcommand_decides_the_exit_code(monkeypatch, code):
    _tool(monkeypatch, lambda args: code)
    assert cli.main(["smollm2"]) == code


def test_the_subcommand_gets_its_arguments(monkeypatch):
    seen = []
    _tool(monkeypatch, lambda args: seen.append(args.count) or 0)
    assert cli.main(["smollm2", "--count", "3"]) == 0
    assert seen == [3]


def test_a_usage_error_is_one_line_on_standard_error_and_exit_code_2(monkeypatch, capsys):
    _tool(monkeypatch, _raise(UsageError("x is 1: give 2")))
    assert cli.main(["smollm2"]) == 2
    assert capsys.readouterr() == ("", "kvcompile: error: x is 1: give 2\n")


def test_an_interrupt_is_exit_code_130_without_a_traceback(monkeypatch, capsys):
    _tool(monkeypatch, _raise(KeyboardInterrupt()))
    assert cli.main(["smollm2"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("fault"), ValueError("not the user's"), OSError("disk")])
def test_any_other_error_propagates(monkeypatch, error):
    _tool(monkeypatch, _raise(error))
    with pytest.raises(type(error)) as caught:
        cli.main(["smollm2"])
    assert caught.value is error


def test_no_command_is_help_and_exit_code_2(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: kvcompile ")
    assert all(name in err for name in cli.COMMANDS)


def test_help_is_exit_code_0_on_standard_output(capsys):
    assert cli.main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert all(name in out for name in cli.COMMANDS)
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nonsense"], "kvcompile: error: unrecognized arguments: --nonsense; see kvcompile --help"),
        (["--nonsense", "smollm2"], "kvcompile: error: unrecognized arguments: --nonsense; see kvcompile --help"),
        (
            ["smollm2", "--nonsense"],
            "kvcompile smollm2: error: unrecognized arguments: --nonsense; see kvcompile smollm2 --help",
        ),
        (
            ["smollm2", "two\nlines"],
            "kvcompile smollm2: error: unrecognized arguments: two lines; see kvcompile smollm2 --help",
        ),
        (
            ["smollm2", "--count", "x"],
            "kvcompile smollm2: error: argument --count: invalid int value: 'x'; allowed is a whole number; "
            "see kvcompile smollm2 --help",
        ),
        (
            ["smollm2", "--count"],
            "kvcompile smollm2: error: argument --count: expected one argument; see kvcompile smollm2 --help",
        ),
        (
            ["smollm2", "--cou", "1"],
            "kvcompile smollm2: error: unrecognized arguments: --cou 1; see kvcompile smollm2 --help",
        ),
        (
            ["quantize", "S"],
            "kvcompile quantize: error: the following arguments are required: OUT; see kvcompile quantize --help",
        ),
        (
            ["quantize", "S", "O", "--foo"],
            "kvcompile quantize: error: unrecognized arguments: --foo; see kvcompile quantize --help",
        ),
        (
            ["quantize", "S", "O", "--calibration-tokens", "x"],
            "kvcompile quantize: error: argument --calibration-tokens: invalid int value: 'x'; allowed is a whole "
            "number; see kvcompile quantize --help",
        ),
        (
            ["graph-dump", "--diff", "A"],
            "kvcompile graph-dump: error: argument --diff: expected 2 arguments; see kvcompile graph-dump --help",
        ),
        (
            ["bench", "act-quant", "--hidden", "x"],
            "kvcompile bench act-quant: error: argument --hidden: invalid int value: 'x'; allowed is a whole number; "
            "see kvcompile bench act-quant --help",
        ),
        (
            ["bench", "w4a8", "--tune-seconds", "x"],
            "kvcompile bench w4a8: error: argument --tune-seconds: invalid float value: 'x'; allowed is a number; "
            "see kvcompile bench w4a8 --help",
        ),
        (
            ["bench", "decode", "--nonsense"],
            "kvcompile bench decode: error: unrecognized arguments: --nonsense; see kvcompile bench decode --help",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, line):
    if "smollm2" in arguments:
        _tool(monkeypatch, lambda args: 0)
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["smolm2"], list(cli.COMMANDS)),
        (["quantize", "S", "O", "--group-size", "7"], ["128", "64", "channel"]),
        (["quantize", "S", "O", "--method", "awq"], ["rtn", "search", "gptq"]),
        (
            ["bench", "act_quant"],
            ["decode", "attention", "w4a8", "act-quant", "prune", "offload", "schedule", "serve", "host"],
        ),
    ],
)
def test_a_wrong_choice_is_one_line_with_the_allowed_ones(capsys, arguments, allowed):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    named = re.search(
        r": error: argument .+: invalid choice: '(.+?)' \(choose from (.+)\); see kvcompile.* --help$", err
    )
    assert named[1] == arguments[-1]
    assert [name.strip("'") for name in named[2].split(", ")] == allowed  # Python 3.12 leaves the quotes out


def test_version_is_that_of_the_distribution(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr() == (f"kvcompile {version('kvcompile')}\n", "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_a_module_with_arguments_and_run(name):
    import importlib

    module = importlib.import_module(f"kvcompile.tools.{name.replace('-', '_')}")
    module.add_arguments(Parser())
    assert callable(module.run)


def test_help_and_version_import_neither_torch_nor_vllm_nor_rich():
    code = (
        "import sys; from kvcompile.cli import main; main(['--help']); main(['--version']);"
        "print([name for name in ('torch', 'vllm', 'rich', 'transformers', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [["-m", "kvcompile.cli"], ["-m", "kvcompile.tools.smollm2"]])
def test_modules_run_as_commands_have_the_same_help(command):
    tail = [] if command[1].endswith("smollm2") else ["smollm2"]
    done = subprocess.run([sys.executable, *command, *tail, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: kvcompile smollm2 ")
