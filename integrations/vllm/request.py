"""How a user asks for kvcompile: the string, its combinations on the command line, and the mark that travels.

    vllm serve M --compilation-config kvcompile                       the preset
    vllm serve M -cc kvcompile -cc.cudagraph_mode=PIECEWISE           + vLLM's own compilation fields, which win
    vllm serve M -cc kvcompile -cc.kvcompile.kv8.enabled=false        + kvcompile's own configuration
    vllm serve M -cc '{"kvcompile": {"strict": true}, "mode": 3}'     the same as JSON
    LLM(model, compilation_config="kvcompile")

By itself vLLM lets the last `--compilation-config` replace all others, so that a dotted override behind the preset
would drop it without a word; `CompilationConfigAction` merges instead, as soon as one occurrence asks for kvcompile.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import CompilationConfig
from vllm.engine.arg_utils import _expand_json_human_readable_numbers

from kvcompile.presets import NAME

# CompilationConfig is a pydantic dataclass: an unknown *field* is refused, an entry of its __dict__ is not, and that
# survives deepcopy and pickle, by which vLLM sends the configuration to its other processes.
_MARK = "_kvcompile_request"


@dataclass(frozen=True)
class Request:
    """A user's wish for kvcompile. `fields`: vLLM's compilation fields given with it; `options`: kvcompile's own."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def compilation_config(self, build: Callable[[str], CompilationConfig] | None = None) -> CompilationConfig:
        """vLLM's CompilationConfig holding only what the user gave, marked with this request.

        `build` parses a JSON string (vLLM's own command-line type, for its error messages); without it the fields are
        passed as keywords.
        """
        config = build(json.dumps(dict(self.fields))) if build else CompilationConfig(**self.fields)
        config.__dict__[_MARK] = self
        return config


def request_of(value: object) -> Request | None:
    """The request that an EngineArgs' or Namespace's `compilation_config` carries, or None where there is none."""
    if isinstance(value, str) and value.strip().strip("\"'") == NAME:
        return Request()
    return getattr(value, "__dict__", {}).get(_MARK)


def _parse(text: str) -> tuple[bool, dict[str, Any], dict[str, Any]] | None:
    """(asks for kvcompile, vLLM's fields, kvcompile's options) of one occurrence; None if vLLM must judge it alone."""
    if text.strip().strip("\"'") == NAME:
        return True, {}, {}
    try:
        fields = json.loads(_expand_json_human_readable_numbers(text))
    except (ValueError, RecursionError):  # not JSON; or numbers of thousands of digits, thousands of brackets
        return None
    if not isinstance(fields, dict):
        return None
    if NAME not in fields:
        return False, fields, {}
    options = fields.pop(NAME)
    if options is True:
        return True, fields, {}
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(
            f'"{NAME}" is {json.dumps(options)}; allowed are true or a table of kvcompile\'s keys, '
            f'such as {{"{NAME}": {{"kv8": {{"enabled": true}}}}}}'
        )
    return True, fields, options


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` laid over `into`, tables merged key by key, everything else replaced: what a later flag means."""
    for key, value in new.items():
        old = into.get(key)
        into[key] = _merge(dict(old), value) if isinstance(old, dict) and isinstance(value, dict) else value
    return into


class CompilationConfigAction(argparse.Action):
    """`--compilation-config`: vLLM's behaviour to the letter unless one occurrence asks for kvcompile."""

    _vllm_type: Callable[[str], CompilationConfig]

    def _reset(self) -> None:
        self._asked, self._fields, self._options = False, {}, {}

    @classmethod
    def install(cls, parser: argparse.ArgumentParser) -> None:
        """Turn `parser`'s own action for `--compilation-config` into this one, in place. Idempotent."""
        action = parser._option_string_actions["--compilation-config"]
        if isinstance(action, cls):
            return
        action._vllm_type, action.type = action.type, str
        action.__class__ = cls
        action._reset()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is self.default:
            self._reset()  # a new command line: the same parser may be used twice
        try:
            parsed = _parse(values)
            if parsed is None:
                config = self._vllm_type(values)  # raises vLLM's own message for what it does not understand
            else:
                asks, fields, options = parsed
                self._asked |= asks
                self._fields = _merge(self._fields, fields)
                self._options = _merge(self._options, options)
                config = (
                    Request(self._fields, self._options).compilation_config(self._vllm_type)
                    if self._asked
                    else self._vllm_type(values)
                )
        except argparse.ArgumentTypeError as error:
            if self._asked or f'"{NAME}"' in values:
                # argparse would print vLLM's usage, some three hundred lines, in front of the one that matters.
                message = f"kvcompile: error: {option_string} {values}: {error}"
                parser.exit(2, f"{' '.join(message.split())}\n")
            if difflib.get_close_matches(values.lower(), [NAME], cutoff=0.8):
                parser.exit(2, f"kvcompile: error: {option_string} {values}: did you mean {NAME}?\n")
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, config)
