"""Which of our environment variables are wrong: all at once, where `resolve` raises for the first."""

from __future__ import annotations

from collections.abc import Mapping

from kvcompile.config import OPTIONS, UsageError, resolve
from kvcompile.config_sources import ALIASES, FILE_VARIABLE, environment_name, read_environment, read_file, read_table


def wrong_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Why in a line, by variable: those that are wrong each by itself, and the first that others disagree with.

    The variable that names a file is wrong if the file is.
    """
    wrong = {}
    for variable, value in sorted(environ.items()):
        try:
            if variable == FILE_VARIABLE:
                table, source = read_file(value)
                read_table(table, OPTIONS, source)
            else:
                read_environment({variable: value}, OPTIONS)
        except UsageError as error:
            wrong[variable] = str(error).removeprefix(f"environment {variable}: ").removeprefix("environment: ")
    try:
        resolve(environ=without(environ, wrong))
    except UsageError as error:  # its message names whatever the values came by
        named = [name for name in (*map(environment_name, OPTIONS), *ALIASES) if name in str(error)]
        wrong |= {name: str(error).removeprefix("environment: ") for name in named if name in environ}
    return wrong


def without(environ: Mapping[str, str], wrong: Mapping[str, str]) -> dict[str, str]:
    """What is left of an environment."""
    return {name: value for name, value in environ.items() if name not in wrong}
