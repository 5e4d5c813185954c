"""The folder of a dump: written whole or not at all, and never over anybody else's files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools.graph_document import FILE, KIND

REPORT = "report.html"
LOG = "engine.log"
_OURS = re.compile(rf"{re.escape(FILE)}|{re.escape(REPORT)}|{re.escape(LOG)}|graph-\d+")


def refuse_foreign(folder: Path) -> None:
    """Raise `UsageError` unless `folder` can be made, is empty, or holds an earlier dump and nothing else."""
    try:
        _refuse(folder)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror or error}; name another place") from None


def _refuse(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--out {folder}: is no folder; name a new one")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--out {folder}: {folder.absolute().parent} does not exist; create it or name another")
    where = folder.resolve()
    # The folder is put in its place as a whole, so these would be taken from under whoever is in them.
    if Path.cwd().is_relative_to(where):
        raise UsageError(f"--out {folder}: is the current folder or holds it; name a new folder in it or elsewhere")
    if os.path.ismount(where):
        raise UsageError(f"--out {folder}: is a mount point, which cannot be replaced; name a new folder in it")
    if not os.access(where.parent, os.W_OK):
        raise UsageError(f"--out {folder}: {where.parent} cannot be written; name another place")
    inside = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in inside if not _OURS.fullmatch(name)]
    if foreign:
        raise UsageError(f"--out {folder}: holds {foreign[0]!r}, which is not of a dump; name a new or empty folder")
    if inside and not _is_dump(folder / FILE):
        raise UsageError(f"--out {folder}: its {FILE} is not of a dump; name a new or empty folder")


def replace(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write everything into a folder beside it, then put that in its place.

    Raises `UsageError` if that cannot be written. An earlier dump is there then as before.
    """
    where = folder.resolve()
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{where.name}.", dir=where.parent))
        try:
            new, old = beside / "new", beside / "old"
            new.mkdir()
            fill(new)
            refuse_foreign(folder)  # compiling took a while
            _exchange(where, new, old)
        finally:
            _remove(beside)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: the dump cannot be written there ({error.strerror or error}); name another place"
        ) from error


def _exchange(folder: Path, new: Path, old: Path) -> None:
    """`new` becomes `folder`, which becomes `old`; if the first fails, `folder` is put back."""
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:  # also a signal between the two
        if old.exists() and not folder.exists():
            try:
                old.rename(folder)
            except OSError as error:
                raise UsageError(f"--out {folder}: {error.strerror or error}; the earlier dump is in {old}") from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove(beside: Path) -> None:
    """All but an earlier dump that could not be put back."""
    shutil.rmtree(beside / "new", ignore_errors=True)
    if not (beside / "old").exists():
        shutil.rmtree(beside, ignore_errors=True)


def _is_dump(path: Path) -> bool:
    try:
        # The first lines tell; the rest may be of another version.
        with path.open(encoding="utf-8") as file:
            return f'"kind": "{KIND}"' in file.read(200)
    except (OSError, ValueError):
        return False
