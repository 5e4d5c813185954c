"""The letters that a kernel is launched with are the parameters its source has, which a GPU would say at load only.

A GPU compares sizes: that a float is not an int, and that no kernel goes without letters, is seen here alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcompile.ops

FOLDER = Path(kvcompile.ops.__file__).parent
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^\n]*\)\s+)?(\w+)\((.*?)\)\s*\{", re.DOTALL)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
MACRO = re.compile(r"^#define (\w+)(?:\((\w+)\))? +(.*)", re.MULTILINE)
LETTERS = {"*": "P", "unsigned long long": "Q", "long long": "q", "unsigned": "I", "int": "i", "float": "f"}


def _texts(source: Path) -> Iterator[str]:
    """The source and what it includes, with continued lines in one and without comments."""
    text = re.sub(r"//[^\n]*", "", source.read_text().replace("\\\n", " "))
    yield text
    for name in INCLUDE.findall(text):
        yield from _texts(next(path for path in (source.parent / name, FOLDER / name) if path.exists()))


def _expanded(text: str, macros: list[tuple[str, str, str]]) -> str:
    before = None
    while text != before:
        before = text
        for name, parameter, body in macros:
            if not parameter:
                text = re.sub(rf"\b{name}\b", lambda _, body=body: body, text)
                continue
            for argument in re.findall(rf"\b{name}\((\w+)\)", text):
                put = re.sub(rf"\b{parameter}\b", argument, body).replace("##", "")
                text = text.replace(f"{name}({argument})", put)
    return text


def _letter(parameter: str) -> str:
    return next(letter for word, letter in LETTERS.items() if word in parameter)


def _kernels() -> dict[str, str]:
    found = {}
    for source in sorted(FOLDER.rglob("*.cu")):
        own, *included = _texts(source)
        macros = MACRO.findall("\n".join((own, *included)))
        for name, parameters in KERNEL.findall(own):
            found[name] = "".join(map(_letter, _expanded(parameters, macros).split(",")))
    return found


def _signatures() -> dict[str, str]:
    modules = (f"kvcompile.ops.{path.parent.name}.{path.stem}" for path in FOLDER.glob("*/cuda*.py"))
    tables = [getattr(importlib.import_module(module), "SIGNATURES", {}) for module in modules]
    return {name: letters for table in tables for name, letters in table.items()}


KERNELS, SIGNATURES = _kernels(), _signatures()


@pytest.mark.parametrize("name", sorted(KERNELS.keys() | SIGNATURES.keys()))
def test_a_kernel_is_launched_with_what_its_source_takes(name: str) -> None:
    assert SIGNATURES.get(name) == KERNELS.get(name)
