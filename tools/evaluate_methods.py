"""Which pruning methods are measured in this process, and on which device: the options, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch

from kvcompile.config import UsageError
from kvcompile.ops.prune import METHODS, Method, parse_method


def add_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"of {', '.join(METHODS)}; such as robust:anchor=0.5 (default: {default})",
    )
    parser.add_argument("--device", help="such as cuda or cpu (default: cuda where there is one)")


def methods(texts: Iterable[str]) -> dict[str, Method]:
    """By the text that names it. Raises UsageError for what names none."""
    return dict(map(_method, texts))


def device(asked: str | None) -> str:
    """Raises UsageError for one that torch cannot use."""
    found = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=found).item()  # "meta" makes tensors, and none that could be read
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {found}: {str(error).splitlines()[0]}; give cpu, or cuda on a GPU") from error
    return found


def refuse(args: argparse.Namespace, *more: str) -> None:
    """Raise UsageError for the first of these options, or of `more`, that is given although a server is asked."""
    for name in ("method", "device", *more):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for a model in this process; leave it out, or leave --endpoint out")


def _method(text: str) -> tuple[str, Method]:
    name, _, rest = text.partition(":")
    parameters = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--method {text}: given {part!r}, allowed PARAMETER=VALUE")
        parameters[key] = _number(text, value)
    try:
        return text, parse_method(name, **parameters)
    except ValueError as error:
        raise UsageError(f"--method {text}: {error}") from error


def _number(text: str, value: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise UsageError(f"--method {text}: given {value!r}, allowed a number")
