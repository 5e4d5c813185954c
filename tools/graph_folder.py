"""The folder of a dump: written whole or not at all, and never over anybody else's files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools.graph_document import FILE, KIND

REPORT = "report.html"
LOG = "engine.log"
_OURS = re.compile(rf"{re.escape(FILE)}|{re.escape(REPORT)}|{re.escape(LOG)}|graph-\d+")


def refuse_foreign(folder: Path) -> None:
    """Raise `UsageError` unless `folder` can be made, is empty, or holds an earlier dump and nothing else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--out {folder}: is no folder; name a new one")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--out {folder}: {folder.absolute().parent} does not exist; create it or name another")
    if not os.access(folder.absolute().parent, os.W_OK):
        raise UsageError(f"--out {folder}: {folder.absolute().parent} cannot be written; name another place")
    if not folder.exists() or not any(folder.iterdir()):
        return
    foreign = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise UsageError(f"--out {folder}: holds {foreign[0]!r}, which is not of a dump; name a new or empty folder")
    if not _is_dump(folder / FILE):
        raise UsageError(f"--out {folder}: its {FILE} is not of a dump; name a new or empty folder")


def replace(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write everything into a folder beside it, then put that in its place."""
    folder = folder.absolute()
    part, old = (folder.with_name(f".{folder.name}.{word}-{os.getpid()}") for word in ("part", "old"))
    part.mkdir()
    try:
        fill(part)
        refuse_foreign(folder)  # compiling took a while
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_dump(path: Path) -> bool:
    try:
        # The first lines tell; the rest may be of another version.
        with path.open(encoding="utf-8") as file:
            return f'"kind": "{KIND}"' in file.read(200)
    except (OSError, ValueError):
        return False
