"""Options of `kvcompile bench serve`: on the command line, or of the same names in a TOML or JSON file; flags win."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.config import UsageError, shown
from kvcompile.tools import model_shapes, record
from kvcompile.tools.serve_systems import SYSTEMS

# The first so that a row is there in which no cache is short.
GRID = "512:512:8,512:512,4096:512,16000:512,512:2048,4096:2048,16000:2048"
TOTAL_GIB = 41.0  # bf16 weights of Llama-3.1-8B and the 26 GiB of KV that a GPU of 48 GB leaves them


class Option(NamedTuple):
    """kind: str, int, float, bool or Path. least: of an int; a float is GiB, above 0."""

    kind: type
    default: Any
    help: str
    metavar: str | None = None
    least: int = 1


OPTIONS = {
    "systems": Option(str, None, f"of {','.join(SYSTEMS)} (default: those that run on this GPU)", "NAME,..."),
    "grid": Option(str, GRID, f"cases (default {GRID})", "PROMPT:OUTPUT[:REQUESTS],..."),
    "requests": Option(int, 32, "sent at once where --grid does not say (default 32)"),
    "total-gib": Option(float, None, f"weights and KV cache of each system (default {TOTAL_GIB:g})"),
    "kv-gib": Option(float, None, "KV cache of each system instead, whatever its weights take"),
    "host-gib": Option(int, 32, "host memory of a system that offloads (default 32)"),
    "max-num-seqs": Option(int, 64, "requests running together (default 64)"),
    "runs": Option(int, 3, "timed runs of a case (default 3)"),
    "gpus": Option(str, "0", "systems are dealt out to them and served side by side (default 0)", "N,..."),
    "together": Option(bool, False, "start all engines of a GPU at once; it must hold them"),
    "json": Option(
        Path, None, "also write the record; runs so far are in FILE.state, and the same command goes on there", "FILE"
    ),
    "markdown": Option(Path, None, "also write the table", "FILE"),
    "plot": Option(Path, None, "also draw output tokens a second; an .svg", "FILE"),
}
_MOST_GIB = 1_000_000  # more than any machine has, and an exact number of bytes
_WHERE = ("json", "markdown", "plot")  # what a result goes to, which it does not depend on
_MEMORY = ("total-gib", "kv-gib")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "the name of a file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"checkpoint folder, or one of {', '.join(model_shapes.SHAPES)}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or JSON with options of the names below")
    for name, option in OPTIONS.items():
        if option.kind is bool:
            parser.add_argument(f"--{name}", action="store_true", default=None, help=option.help)
        else:
            parser.add_argument(f"--{name}", type=option.kind, metavar=option.metavar, help=option.help)


def complete(args: argparse.Namespace) -> None:
    """Fill in what the command line leaves out, from --config and then from defaults; refuse what cannot be used.

    Raises UsageError.
    """
    given = {name for name in OPTIONS if getattr(args, _field(name)) is not None}
    table = _table(args.config) if args.config else {}
    for names, where in ((given, ""), (table, f"{args.config}: ")):
        if set(_MEMORY) <= set(names):
            raise UsageError(f"{where}--total-gib and --kv-gib are both given; give one of them")
    if given & set(_MEMORY):
        table = {name: value for name, value in table.items() if name not in _MEMORY}
    for name, option in OPTIONS.items():
        if name not in given:
            setattr(args, _field(name), table.get(name, option.default))
        _check(name, option, getattr(args, _field(name)))
    if args.kv_gib is None and args.total_gib is None:
        args.total_gib = TOTAL_GIB
    record.check_targets({f"--{name}": getattr(args, name) for name in _WHERE})
    if args.plot and args.plot.suffix != ".svg":
        raise UsageError(f"--plot {args.plot}: it draws SVG alone; end the name in .svg")


def deciding(args: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on: all options but the files that it is written to."""
    return {"model": args.model} | {name: getattr(args, _field(name)) for name in OPTIONS if name not in _WHERE}


def _check(name: str, option: Option, value: Any) -> None:
    if option.kind is int and value < option.least:
        raise UsageError(f"--{name} is {value}; allowed is {option.least} or more")
    if option.kind is float and value is not None and not 0 < value <= _MOST_GIB:
        raise UsageError(f"--{name} is {value}; allowed is more than 0, up to {_MOST_GIB:,}")


def _table(path: Path) -> Mapping[str, Any]:
    """The options in a file, of their kinds. Raises UsageError for a file or a value of another kind."""
    if path.suffix not in (".toml", ".json"):
        raise UsageError(f"--config {path}: allowed are files whose names end in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: cannot be read ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(table, dict):
        raise UsageError(f"--config {path}: holds no table of options; correct it")
    return {name: _value(path, name, value) for name, value in table.items()}


def _value(path: Path, name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise UsageError(f"--config {path}: unknown key {shown(name)}; allowed are {', '.join(OPTIONS)}")
    kind = OPTIONS[name].kind
    if kind is str and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    expected = {Path: str, float: (int, float)}.get(kind, kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        more = ", or a list of texts" if kind is str else ""
        raise UsageError(f"--config {path}: {name} is {shown(value)}; allowed is {_WORDS[kind]}{more}")
    try:
        return kind(value)
    except OverflowError:  # a whole number for a float
        raise UsageError(f"--config {path}: {name} is a number beyond all measure; correct it") from None


def _field(name: str) -> str:
    return name.replace("-", "_")
