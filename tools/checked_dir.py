"""A directory of built files that is either absent or complete and verified, whoever builds it and however it ends."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from kvcompile.config import UsageError

MANIFEST = "kvcompile-manifest.json"
_LOCK_NOTICE_S = 1.0


def ensure(
    directory: Path,
    *,
    key: str,
    names: frozenset[str],
    size_bytes: int,
    build: Callable[[Path], None],
    say: Callable[[str], None],
) -> None:
    """Return once `directory` holds the files `names` as the build named `key` made them; build them if it does not.

    A build happens in a hidden directory beside it, under a lock that other processes wait for, and is renamed into
    place after everything, manifest included, is written: a killed build leaves nothing under the final name. Each use
    checks size and SHA-256 of every file; damage is reported by one `say` and built anew. `size_bytes` is the space a
    build takes. Raises UsageError for a place that cannot be written, is too full, or holds files of someone else.
    """
    try:
        if fault(directory, key, names) is None:
            return  # before any lock: a complete directory serves from a read-only place too
        _refuse_foreign(directory, names)  # before anything is left in a place that was named by mistake
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory, say):
            reason = fault(directory, key, names)
            if reason is not None:
                _rebuild(directory, key, names, size_bytes, build, say, reason)
    except OSError as error:
        cause = error.strerror or str(error)
        raise UsageError(
            f"cannot build {directory}: {cause}; name a writable directory in KVCOMPILE_CACHE_DIR or with --out"
        ) from error


def fault(directory: Path, key: str, names: frozenset[str]) -> str | None:
    """What is wrong with `directory`, in words, or None. "absent" if it is empty or does not exist."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return "absent"
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        listed = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        made_by = manifest["key"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    if made_by != key:
        return "it was made from another model file or by another version of kvcompile"
    if listed.keys() != names:
        return f"{MANIFEST} does not list the files that belong here"
    for name, (size, digest) in listed.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{name} is corrupt (its SHA-256 differs)"
    return None


def sha256(path: Path) -> str:
    """The SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locked(directory: Path, say: Callable[[str], None]) -> AbstractContextManager[object]:
    """The lock of `directory`, taken. One that has to be waited for is mentioned, so that nothing seems to hang."""
    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    try:
        return lock.acquire(timeout=_LOCK_NOTICE_S)
    except Timeout:
        say(f"waiting for another process that is building {directory}")
        return lock.acquire()


def _refuse_foreign(directory: Path, names: frozenset[str]) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file; name a new or empty directory")
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in names | {MANIFEST})
    if foreign:
        raise UsageError(
            f"{directory} holds {foreign[0]!r}, which is not part of a checkpoint; name a new or empty directory"
        )


def _rebuild(
    directory: Path,
    key: str,
    names: frozenset[str],
    size_bytes: int,
    build: Callable[[Path], None],
    say: Callable[[str], None],
    reason: str,
) -> None:
    _refuse_foreign(directory, names)
    if reason != "absent":
        say(f"rebuilding {directory}: {reason}")
        shutil.rmtree(directory)
    # The lock is held, so a build directory that is still here belongs to a process that died.
    prefix = f".{directory.name}.building-"
    for stale in [path for path in directory.parent.iterdir() if path.name.startswith(prefix)]:
        shutil.rmtree(stale)
    free = shutil.disk_usage(directory.parent).free
    if free < size_bytes:
        raise UsageError(
            f"{directory.parent} has {free >> 20} MiB free and {-(-size_bytes >> 20)} MiB are needed; "
            "free some space, or name another directory in KVCOMPILE_CACHE_DIR or with --out"
        )
    building = directory.with_name(f"{prefix}{os.getpid()}")
    building.mkdir()
    try:
        build(building)
        entries = {
            name: {"bytes": (building / name).stat().st_size, "sha256": sha256(building / name)}
            for name in sorted(names)
        }
        manifest = json.dumps({"key": key, "files": entries}, indent=2) + "\n"
        (building / MANIFEST).write_text(manifest, encoding="utf-8")
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
