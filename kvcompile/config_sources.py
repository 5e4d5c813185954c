"""Read the sources of a configuration and merge them: preset, file, environment, --additional-config; later wins.

The rules come in as an argument (`options`: dotted key -> Option, in the order of the documentation), so that this
module knows how settings are written and nothing of which settings there are.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.config_options import Option, UsageError, shown

PREFIX = "KVCOMPILE_"
FILE_VARIABLE = "KVCOMPILE_CONFIG"
RESERVED = (FILE_VARIABLE, "KVCOMPILE_CACHE_DIR")
ALIASES = {"VLLM_ANDPRO_BUDGET_TOKENS": "prune.budget_tokens"}
PRESET_SOURCE = "built-in preset"
FLAG_SOURCE = "--additional-config"


class Setting(NamedTuple):
    """A checked value and the human name of the source that gave it."""

    value: Any
    source: str


def merge(
    options: Mapping[str, Option],
    *,
    base: object,
    environ: Mapping[str, str],
    overrides: object,
    overrides_source: str = FLAG_SOURCE,
) -> dict[str, Setting]:
    """Every key that some source sets, with the value of the last one.

    A wrong value raises UsageError even where a later source replaces it: it would come back when that one is removed.
    """
    settings: dict[str, Setting] = {}
    if base is not None:
        settings |= read_table(base, options, PRESET_SOURCE)
    if FILE_VARIABLE in environ:
        table, source = read_file(environ[FILE_VARIABLE])
        settings |= read_table(table, options, source)
    settings |= read_environment(environ, options)
    if overrides is not None:
        settings |= read_table(overrides, options, overrides_source)
    return settings


def read_table(table: object, options: Mapping[str, Option], source: str) -> dict[str, Setting]:
    """The settings of one mapping, whose keys may be nested, dotted, or both."""
    sections = _sections(options)
    if not isinstance(table, Mapping):
        names = ", ".join(_top_level(options))
        raise UsageError(f"{source}: the top level is {shown(table)}: give a table of {names}")
    found: dict[str, Setting] = {}
    for name, value in table.items():
        if name not in sections:
            entries = [(name, value)]
        elif isinstance(value, Mapping):
            entries = [(f"{name}.{inner}", inner_value) for inner, inner_value in value.items()]
        else:
            example = next(key for key in options if key.startswith(f"{name}."))
            raise UsageError(f"{source}: {name} is {shown(value)}: give a table of options, such as {example}")
        for key, entry in entries:
            if key not in options:
                raise UsageError(f"{source}: unknown key {shown(key)}: {_instead_of_key(str(key), options)}")
            if key in found:
                raise UsageError(f"{source}: {key} is given twice, nested and dotted: keep one of the two")
            found[key] = _setting(source, options[key].from_source, entry)
    return found


def read_file(name: str) -> tuple[object, str]:
    """The content of a TOML or JSON file, told apart by the extension, and its name as a source."""
    suffix = Path(name).suffix.lower()
    if suffix not in (".toml", ".json"):
        raise UsageError(
            f"environment {FILE_VARIABLE}: {shown(name)} is not a configuration file: "
            "name a .toml or .json file, or unset the variable"
        )
    source = f"file {name if name.isprintable() else shown(name)}"
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{source}: cannot be read ({reason}): correct {FILE_VARIABLE} or the file's permissions"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{source}, line {line}: not UTF-8: save the file as UTF-8") from error
    return _parse(text, suffix, source), source


def read_environment(environ: Mapping[str, str], options: Mapping[str, Option]) -> dict[str, Setting]:
    """The settings of the environment, from KVCOMPILE_<SECTION>_<FIELD> and the aliases."""
    variables = {environment_name(key): key for key in options}
    found: dict[str, Setting] = {}
    # Own names sort before their aliases, so an alias meets the value that it must agree with.
    for variable in sorted(environ):
        key = variables.get(variable) or ALIASES.get(variable)
        if key is None:
            if variable.startswith(PREFIX) and variable not in RESERVED:
                instead = _instead_of_variable(variable, [*RESERVED, *variables])
                raise UsageError(f"environment: unknown variable {shown(variable)}: {instead}")
            continue
        setting = _setting(f"environment {variable}", options[key].from_text, environ[variable])
        first = found.setdefault(key, setting)
        if first.value != setting.value:
            raise UsageError(
                f"environment: {environment_name(key)} is {shown(first.value)} but {variable}, another name of {key}, "
                f"is {shown(setting.value)}: set one of the two"
            )
    return found


def environment_name(key: str) -> str:
    """The environment variable of a dotted key: prune.keep_ratio -> KVCOMPILE_PRUNE_KEEP_RATIO."""
    return PREFIX + key.replace(".", "_").upper()


def _setting(source: str, read: Callable[[Any], Any], value: object) -> Setting:
    try:
        return Setting(read(value), source)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _parse(text: str, suffix: str, source: str) -> object:
    def table(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # json keeps the last of equal keys without a word; tomllib refuses them itself.
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise UsageError(f"{source}: {shown(key)} is given twice in one table: keep one of the two")
            found[key] = value
        return found

    try:
        return tomllib.loads(text) if suffix == ".toml" else json.loads(text, object_pairs_hook=table)
    except UsageError:
        raise
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}, line {error.lineno}: {error.msg}: correct the file") from error
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).rpartition(" (at ")
        line = re.match(r"line (\d+)", place)
        number = line[1] if line else len(text.splitlines())
        raise UsageError(f"{source}, line {number}: {_printable(reason)}: correct the file") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise UsageError(f"{source}: cannot be parsed ({_printable(str(error))}): correct the file") from error


def _printable(text: str) -> str:
    return text if text.isprintable() else shown(text)


def _sections(options: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in options if "." in key))


def _top_level(options: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in options))


def _nearest(name: str, candidates: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1)), None)


def _instead_of_key(key: str, options: Mapping[str, Option]) -> str:
    """What to do about an unknown key: the nearest option of its own section, then of all, then the allowed list."""
    section, _, rest = key.lower().partition(".")
    inside = {k.partition(".")[2]: k for k in options if k.startswith(f"{section}.")}
    # Compared by the last part alone: a long common prefix would make everything in a section look alike.
    everywhere = {k.rpartition(".")[2]: k for k in reversed(options)} | {k: k for k in _top_level(options)}
    for names in (inside, everywhere):
        nearest = _nearest(rest or section, names)
        if nearest:
            return f"did you mean {names[nearest]}?"
    if inside:
        return f"allowed in {section} are {', '.join(inside)}"
    return f"allowed are {', '.join(_top_level(options))}"


def _instead_of_variable(variable: str, allowed: list[str]) -> str:
    nearest = _nearest(variable.upper().removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in allowed])
    return f"did you mean {PREFIX}{nearest}?" if nearest else f"allowed are {', '.join(allowed)}"
