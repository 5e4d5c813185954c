"""The argument parser of every `kvcompile` command: what is wrong with a command line is told in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

# What argparse says of a value that `type` does not take, and what it would have taken.
_ALLOWED = {"int": "a whole number", "float": "a number"}
_INVALID = re.compile(r"invalid (\w+) value: ")


class Parser(argparse.ArgumentParser):
    """argparse's, but an error is one line without the usage, and an option belongs to the command it is given to.

    Sub-parsers are of the same class, since argparse makes them of their parent's.
    """

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line: what was given, what is allowed, and where to read more."""
        found = _INVALID.search(message)
        if found and found[1] in _ALLOWED:
            message += f"; allowed is {_ALLOWED[found[1]]}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing is left over: argparse would leave it to the topmost parser, which knows no more of it."""
        namespace, unknown = self.parse_with_rest(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, []

    def parse_with_rest(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """For a command whose other arguments are somebody else's."""
        return super().parse_known_args(args, namespace)
