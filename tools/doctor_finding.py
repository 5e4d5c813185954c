"""What a probe of `kvcompile doctor` returns, and what it is told of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One row. `state`: "ok"; "warn", restricted; "fail", would stop kvcompile; the last two have a remedy."""

    section: str
    name: str
    state: str
    value: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
