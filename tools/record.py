"""Benchmark records: one JSON per benchmark, the same shape for all, written where the numbers were measured.

    {"name", "date", "gpu", "cpu", "versions", "command", "rows": [{"case", "system", "metric", "unit", "median", "min",
     "max", "runs"}, ...]}

All rows of a record come from one run, so that they can be compared.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvcompile.config import UsageError

_PACKAGES = ("kvcompile", "vllm", "torch", "triton")
_COLUMNS = 110  # that the widest table takes


def console() -> Console:
    """For tables of figures, which a pipe or a narrow terminal must not cut: long lines wrap there."""
    wide = Console(highlight=False)
    wide.width = max(wide.width, _COLUMNS)
    return wide


def row(case: str, system: str, metric: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """One measured quantity: median and spread of `values`, one value per run."""
    return {
        "case": case,
        "system": system,
        "metric": metric,
        "unit": unit,
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": len(values),
    }


def record(
    name: str, command: str, rows: Sequence[dict[str, Any]], more_packages: Sequence[str] = ()
) -> dict[str, Any]:
    """The record of a run that ends now, on this machine, with the packages installed here.

    more_packages: whose versions belong in it too.
    """
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": gpu(),
        "cpu": _cpu(),
        "versions": versions(*more_packages),
        "command": command,
        "rows": list(rows),
    }


def command() -> str:
    """The program's name and its own arguments: what a reader types, wherever it is installed."""
    return shlex.join(["kvcompile", *sys.argv[1:]])


def check_target(option: str, path: Path | None) -> None:
    """Raise UsageError if what an option names cannot be written: before work starts, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option} {path}: a device or a pipe, which a file would replace; give the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder does not exist; create it or name another")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: the folder cannot be written to; name another")


def check_targets(paths: Mapping[str, Path | None]) -> None:
    """As `check_target` of each, by the option that names it; raise UsageError for two that are one file, too."""
    named: dict[Path, str] = {}
    for option, path in paths.items():
        check_target(option, path)
        if path is not None and (other := named.setdefault(path.resolve(), option)) != option:
            raise UsageError(f"{option} {path}: {other} is written there; name another")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the record whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def versions(*more_packages: str) -> dict[str, str | None]:
    """The installed versions of the packages that a measurement depends on."""
    return {package: _version(package) for package in (*_PACKAGES, *more_packages)}


def gpu() -> str | None:
    """The GPU that vLLM would use: none with its CPU build, whatever torch can see."""
    if "cpu" in (_version("vllm") or "") or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name()


def _cpu() -> str:
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return f"{name.group(1) if name else 'unknown'}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
