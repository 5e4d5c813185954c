"""SRC and OUT of the commands that make a checkpoint folder out of another, as the user typed them."""

from __future__ import annotations

import os
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools.quantize_side import refuse_no_text


def source_and_out(src: str, out: str) -> tuple[Path, Path]:
    """Both absolute, SRC without symbolic links; neither need exist.

    Raises UsageError for a path that is empty, that the system cannot follow (a loop of links, too long a name, a `~`
    of nobody), or that is no text, and for two that lie one in the other.
    """
    for name, path, what in (("SRC", src, "the folder of a checkpoint"), ("OUT", out, "a folder to make")):
        if not path:
            raise UsageError(f"{name} is empty; give {what}")
        refuse_no_text(name, Path(path))
    source, target = _followed("SRC", Path(src)).resolve(), _expanded("OUT", Path(out))
    if not target.name:
        raise UsageError(f"OUT {target} exists; name a new folder")
    parent = _followed("OUT", target.parent)
    _followed("OUT", target.with_name(f"{target.name}.part"), links=False)
    real = parent.resolve() / target.name
    if real.is_relative_to(source) or source.is_relative_to(real):
        raise UsageError(f"OUT {target} and SRC {source} lie one in the other; name another OUT")
    return source, target


def _expanded(name: str, path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{name} {path}: {error}; give the folder's full path") from error


def _followed(name: str, path: Path, *, links: bool = True) -> Path:
    """`path` in full, once the system has said what is there, or that nothing is."""
    path = _expanded(name, path)
    try:
        os.stat(path, follow_symlinks=links)
    except (FileNotFoundError, NotADirectoryError):
        pass  # each command says itself what it misses
    except OSError as error:
        raise UsageError(f"{name} {path}: {error.strerror}; name another folder") from error
    return path
