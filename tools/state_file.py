"""What a run has found so far, in a file of JSON lines beside its record: the same command goes on from there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import kvcompile.integrations
import kvcompile.ops
import kvcompile.passes
import kvcompile.tools
from kvcompile.config import UsageError
from kvcompile.tools import record
from kvcompile.tools.quantize_progress import say

_FIRST = '{"identity": '
_locked: dict[Path, TextIO] = {}  # files that this process writes to, open and locked


class StateFile:
    """Entries as they come, one line each, behind `identity`: what has to be the same for them to go together.

    take: is given each entry that is there, and raises KeyError or TypeError for one that is none of its own. what:
    they are called. Raises UsageError if the file at `path` is of another identity and has entries, is none of ours, is
    another process's, or cannot be written.
    """

    def __init__(self, path: Path, identity: dict[str, Any], what: str, take: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.kept = path, 0
        with _told(path):
            _lock(path)
            if path.stat().st_size:
                self._read(json.loads(json.dumps(identity)), what, take)
            if not self.kept:  # of a command that came to nothing, nothing is held against another
                path.write_text(json.dumps({"identity": identity}) + "\n")

    def append(self, entry: dict[str, Any]) -> None:
        """Threads and processes may do so at once."""
        line = (json.dumps(entry) + "\n").encode()
        with _told(self.path):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(file, line) < len(line):  # by one call, so that no other's line comes between
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)

    def done(self) -> None:
        """The record has been written: what a later run could take up is not to be mistaken for it."""
        _locked.pop(self.path).close()
        self.path.unlink()

    def _read(self, identity: dict[str, Any], what: str, take: Callable[[dict[str, Any]], None]) -> None:
        try:
            text = self.path.read_text()
            whole, _, cut = text.rpartition("\n")  # a line that an end cut short is worth nothing
            if not whole and cut.startswith(_FIRST[: len(cut)]):
                return
            first, *entries = [json.loads(line) for line in whole.splitlines()]
            before = dict(first["identity"])
            for entry in entries:
                take(entry)
                self.kept += 1
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path} does not hold what a run left ({error!r}); remove it, or name another --json"
            ) from None
        other = [key for key, value in identity.items() if before.get(key) != value]
        if other and self.kept:
            raise UsageError(
                f"{self.path} holds {what} that were made with another {', '.join(other)}; repeat that command as it "
                "was, remove the file, or name another --json"
            )
        if cut:
            self.path.write_text(whole + "\n")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system says of the file in a line."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): it keeps what the run finds, which the same command can go "
            "on from; make room or give leave, or name another --json"
        ) from None


def _lock(path: Path) -> None:
    """Until the record is there or the process ends. What this process has given up itself is in nobody's way."""
    if before := _locked.pop(path, None):
        before.close()
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"{path} is being written by another run; wait for it, or name another --json") from None
    _locked[path] = file


def beside(record_file: Path) -> Path:
    """Where the state of the run is kept that will write this record."""
    return record_file.with_name(record_file.name + ".state")


def installation(*more_packages: str) -> dict[str, Any]:
    """Of an identity: the GPU, the packages, and all of our code; of the tools too, by which things are measured."""
    from kvcompile.passes.pipeline import source_hash  # takes seconds to load

    code = source_hash(kvcompile, kvcompile.ops, kvcompile.passes, kvcompile.integrations, kvcompile.tools)
    return {"GPU": record.gpu(), "package": record.versions(*more_packages), "kvcompile": code}


def tell(who: str, file: StateFile, what: str) -> None:
    """Say, if any were there, that the run goes on from them."""
    if file.kept:
        say(f"{who}: {file.path} has {file.kept} {what} of this command; going on from them")
