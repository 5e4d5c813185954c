"""The `kvcompile` command. Each subcommand is a module of kvcompile.tools, imported only when it is asked for."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvcompile.arguments import Parser

COMMANDS = {
    "demo": "serve a real model on this machine and show what kvcompile does to its KV cache",
    "bench": "measure stock vLLM and kvcompile in one run, and write a benchmark record",
    "evaluate": "measure quality, in this process or served: generated questions, perplexity, LongBench",
    "doctor": "check this machine and installation, and say what would be active",
    "graph-dump": "show what the FX passes do to the graphs of a model, or compare two such dumps",
    "quantize": "make a W4A8 checkpoint (4-bit weights, int8 activations) of a Hugging Face checkpoint",
    "import-qserve": "turn a W4A8 checkpoint of QServe / OmniServe into one that vLLM can serve",
    "smollm2": "build the small checkpoint that the demo and the tests use, and print its path",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 success; 1 what the subcommand found; 2 a usage error, told in one line on standard error; 130 interrupted.
    Anything else is a fault of kvcompile and propagates.
    """
    from kvcompile.config import UsageError

    arguments = list(sys.argv[1:] if argv is None else argv)
    named = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser = _parser(named)
        try:
            args = parser.parse_args(arguments)
        except SystemExit as stop:  # argparse has printed its help (0) or its error (2)
            return int(stop.code or 0)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        return args.run(args)
    except UsageError as error:
        print(f"kvcompile: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _end(number: int, _frame: object) -> NoReturn:
    """Unwind as from an exception, so that a subcommand ends the server that it has started."""
    raise SystemExit(128 + number)


def _parser(named: str | None) -> Parser:
    """The parser, with the arguments of subcommand `named` alone: the others are listed but not imported."""
    parser = Parser(prog="kvcompile", description="Long-context serving on stock vLLM.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name == named:
            module = importlib.import_module(f"kvcompile.tools.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


class _Version(argparse.Action):
    """argparse's own version action wants the text up front; this one looks it up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvcompile import __version__

        print(f"kvcompile {__version__}")
        parser.exit()


def command() -> NoReturn:
    """The `kvcompile` executable: `main` in a process of its own, where a signal unwinds it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    sys.exit(main())


if __name__ == "__main__":
    command()
