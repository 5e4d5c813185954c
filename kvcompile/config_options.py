"""One option of the configuration: what it may hold, how it is written, and the one-line error when it is wrong."""

import dataclasses
import re
from functools import cache
from types import NoneType
from typing import Any, NoReturn, get_args

WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
# 18 digits hold every allowed value, and keep int() far from the length at which it raises.
_DIGITS = re.compile(r"[+-]?[0-9]{1,18}")
_SIZE = re.compile(r"([0-9]{1,18}) ?(" + "|".join(UNITS) + ")", re.IGNORECASE)


class UsageError(ValueError):
    """A mistake of the user, in one line: what was given, what is allowed, what to do."""


def shown(value: object) -> str:
    """A value as one short printable line for a message."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # Python declines to print integers of more than 4300 digits
        return "a number of over 4000 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def size_text(count: int) -> str:
    """Bytes with the largest binary unit that divides them, such as 4GiB."""
    return next((f"{count // factor}{unit}" for unit, factor in UNITS.items() if count % factor == 0), str(count))


@dataclasses.dataclass(frozen=True)
class Option:
    """The rules for one value.

    `key` is dotted (`prune.keep_ratio`). The range is low <= value <= high, or above < value <= high. `size` marks a
    count of bytes, which a source may write with a binary unit.
    """

    key: str
    kind: type
    optional: bool
    default: Any
    low: int | float | None
    above: int | float | None
    high: int | float | None
    choices: tuple[str, ...] | None
    size: bool
    doc: str

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        if self.choices:
            text = f"one of {', '.join(self.choices)}"
        elif self.kind is bool:
            text = "true or false"
        elif self.size:
            text = "bytes as a whole number or with a unit such as 8GiB (KiB, MiB, GiB, TiB)" + self._range()
        else:
            text = ("a whole number" if self.kind is int else "a number") + self._range()
        return f"{text}, or none" if self.optional else text

    def _range(self) -> str:
        write = size_text if self.size else str
        lower = "" if self.low is None else f"{write(self.low)} <= "
        lower = lower if self.above is None else f"{write(self.above)} < "
        upper = "" if self.high is None else f" <= {write(self.high)}"
        return f", {lower}value{upper}" if lower or upper else ""

    def check(self, value: object) -> Any:
        """The value, valid and of the option's own type (an int becomes a float where that is asked for).

        Raises UsageError for a value of another type, out of range, not finite, or not among the choices.
        """
        if value is None and self.optional:
            return None
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            self.refuse(value, note=" (a string)" if isinstance(value, str) else "")
        if self.choices and value not in self.choices:
            self.refuse(value)
        # Written as "not inside" because NaN is neither below a bound nor above it.
        inside = (
            (self.low is None or self.low <= value)
            and (self.above is None or self.above < value)
            and (self.high is None or value <= self.high)
        )
        if not inside:
            self.refuse(value)
        # Adding 0.0 turns -0.0 into 0.0, so that equal configurations are also equal as text.
        return float(value) + 0.0 if self.kind is float else value

    def from_source(self, value: object) -> Any:
        """A value of a file or a mapping, checked; of all texts only a size with its unit becomes a number."""
        if self.size and isinstance(value, str):
            match = _SIZE.fullmatch(value.strip())
            if match is None:
                self.refuse(value, note=" (a string)")
            value = int(match[1]) * next(UNITS[unit] for unit in UNITS if unit.lower() == match[2].lower())
        return self.check(value)

    def from_text(self, text: str) -> Any:
        """The value that an environment variable spells, checked."""
        stripped = text.strip()
        word = stripped.lower()
        if self.optional and word == "none":
            return None
        if self.kind is bool:
            if word not in WORDS:
                self.refuse(text, allowed=f"one of {', '.join(WORDS)}")
            return WORDS[word]
        if self.kind is str:
            return self.check(stripped)
        if self.size and _SIZE.fullmatch(stripped):
            return self.from_source(stripped)
        if self.kind is int:
            if not _DIGITS.fullmatch(stripped):
                self.refuse(text)
            return self.check(int(stripped))
        try:
            # float() also reads digit separators and the digits of other scripts; neither is a way to write a setting.
            number = float(stripped) if stripped.isascii() and "_" not in stripped else None
        except ValueError:
            number = None
        return self.refuse(text) if number is None else self.check(number)

    def refuse(self, value: object, *, note: str = "", allowed: str | None = None) -> NoReturn:
        """Raise the one-line error for `value`."""
        default = size_text(self.default) if self.size else self.default
        default = default if isinstance(default, str) else shown(default)
        raise UsageError(
            f"{self.key} is {shown(value)}{note}: give {allowed or self.allowed}, "
            f"or leave it out for the default {default}"
        )


def option(
    default: Any,
    *,
    low: int | float | None = None,
    above: int | float | None = None,
    high: int | float | None = None,
    choices: tuple[str, ...] | None = None,
    size: bool = False,
    doc: str = "",
) -> Any:
    """A dataclass field that is an option; `low` and `high` are allowed values, `above` is just outside."""
    rules = {"low": low, "above": above, "high": high, "choices": choices, "size": size, "doc": doc}
    return dataclasses.field(default=default, metadata=rules)


@cache
def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in order; its `SECTION` is the first part of their keys."""
    found = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            continue
        # A plain type has no arguments; `int | None` has two.
        kinds = get_args(field.type) or (field.type,)
        kind = next(k for k in kinds if k is not NoneType)
        key = f"{cls.SECTION}.{field.name}" if cls.SECTION else field.name
        found.append(Option(key, kind, NoneType in kinds, field.default, **field.metadata))
    return tuple(found)


def validate(instance: Any) -> None:
    """Check every option of a frozen dataclass in place; raises UsageError naming the first that is wrong."""
    for rules in options_of(type(instance)):
        name = rules.key.rpartition(".")[2]
        object.__setattr__(instance, name, rules.check(getattr(instance, name)))
