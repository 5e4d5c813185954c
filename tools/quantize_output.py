"""Where `kvcompile quantize` writes: OUT.part, which a rerun continues, until one rename makes it OUT.

OUT.part holds finished files only (each is written under another name and renamed), and a manifest that says what they
were made from, with which arguments, and how large each of them is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.config import UsageError

MANIFEST = "kvcompile_quantize.part.json"
COMPLETE = "complete"  # the step after which only the rename is left
LAYER_SUFFIX = ".part.safetensors"  # of the steps that are a calibrated layer; the others are shards

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype as safetensors writes it, shape

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


class Workspace:
    """OUT.part, locked for this process. `rows` holds what was reported with each finished step, by its name."""

    def __init__(self, out: Path, made_from: dict[str, Any]) -> None:
        """Make or continue OUT.part for a run described by `made_from` (JSON; the values are compared one by one).

        Raises UsageError if OUT exists, if another process is at work, or if OUT.part is of another kind of run.
        """
        self.out, self.path = out, out.with_name(f"{out.name}.part")
        if os.path.lexists(out):
            raise UsageError(f"OUT {out} exists; name a new folder, or remove it")
        if not out.parent.is_dir():
            raise UsageError(f"OUT {out}: the folder {out.parent} does not exist; create it or name another")
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UsageError(f"{self.path} is in the way of a run that writes there; remove it")
        self.found = self.path.exists()  # what another run has left
        self.path.mkdir(exist_ok=True)
        self._sizes: dict[str, int] = {}  # of the files written so far
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._made_from = json.loads(json.dumps(made_from))  # as it will be read back
            self.rows = self._continue()
            try:
                self._record()
            except BaseException:
                self._remove_unless_begun()
                raise
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"{self.path} is in use by another run; wait for it, or name another OUT") from None
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that ends before its first step is complete leaves nothing; any other can be continued."""
        try:
            if kind is not None and issubclass(kind, (UsageError, OSError, KeyboardInterrupt, SystemExit)):
                self._remove_unless_begun()
        finally:
            os.close(self._lock)

    def done(self, step: str) -> bool:
        return step in self.rows

    def finish(self, step: str, rows: list[dict[str, Any]]) -> None:
        """Record that the files of `step` are complete, with the `rows` to report."""
        self.rows[step] = rows
        self._record()

    def write_json(self, name: str, value: Any) -> None:
        with self._complete(name) as path:
            # In ASCII: half a character, which JSON can hold escaped, has no UTF-8.
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def write_tensors(self, name: str, entries: list[Entry], tensors: Iterable[Tensor]) -> None:
        """A safetensors file of `tensors`, which come in the order of `entries`; one of them is in memory at a time."""
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for tensor, dtype, shape in entries:
            end = offset + stored_bytes(dtype, shape)
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        with self._complete(name) as path, path.open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for tensor in tensors:
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
            if file.tell() != 8 + len(head) + offset:
                raise RuntimeError(f"{path}: {file.tell()} bytes written, {8 + len(head) + offset} announced")

    def copy(self, file: Path, name: str) -> None:
        """Copy `file` to `name`, which may be in a subfolder."""
        (self.path / name).parent.mkdir(exist_ok=True)
        with self._complete(name) as path:
            shutil.copyfile(file, path)

    def need(self, size_bytes: int) -> None:
        """Raise UsageError unless the result, of `size_bytes` in all, fits beside what is there already."""
        present = sum(file.stat().st_size for file in self.path.iterdir() if not file.name.endswith(".tmp"))
        missing, free = size_bytes - present, shutil.disk_usage(self.path).free
        if free < missing:
            raise UsageError(
                f"{self.path.parent} has {free >> 20} MiB free and {-(-missing >> 20)} MiB are needed; "
                "free some space, or name another OUT"
            )

    def publish(self, drop: Iterable[str] = ()) -> None:
        """Rename OUT.part to OUT without the files `drop`. A run that is stopped in here has only this to do again."""
        drop = list(drop)
        self._sizes = {name: size for name, size in self._sizes.items() if name not in drop}
        self.finish(COMPLETE, [])
        for name in drop:
            (self.path / name).unlink(missing_ok=True)
        os.fsync(self._lock)
        if os.path.lexists(self.out):  # rename(2) would replace an empty folder that has come up meanwhile
            raise UsageError(f"OUT {self.out} has come up meanwhile; remove it and run the same again to finish")
        self.path.rename(self.out)
        parent = os.open(self.out.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
        (self.out / MANIFEST).unlink()

    def _remove_unless_begun(self) -> None:
        if not self.rows:
            shutil.rmtree(self.path)

    def _record(self) -> None:
        self.write_json(MANIFEST, {"made_from": self._made_from, "steps": self.rows, "sizes": self._sizes})

    def _continue(self) -> dict[str, list[dict[str, Any]]]:
        present = [file.name for file in self.path.iterdir()]
        if not present:
            return {}
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            before, steps, sizes = manifest["made_from"], dict(manifest["steps"]), dict(manifest["sizes"])
        except (OSError, ValueError, KeyError, TypeError):
            if present == [f"{MANIFEST}.tmp"]:
                return {}  # killed before it had written what it is
            raise UsageError(f"{self.path} is not of a run of kvcompile quantize; remove it") from None
        now = self._made_from
        different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if different:
            raise UsageError(
                f"{self.path} is of a run with {_difference(different[0], before, now)}; "
                "give the same again to continue it, or remove the folder"
            )
        for name, size in sizes.items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size != size:
                raise UsageError(f"{path} is not what an earlier run left there; remove {self.path} and start again")
        self._sizes = sizes
        return steps

    @contextmanager
    def _complete(self, name: str) -> Iterator[Path]:
        """A path to write to, renamed to `name` once all of it is on disk."""
        path = self.path / f"{name}.tmp"
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())
        if name != MANIFEST:
            self._sizes[name] = path.stat().st_size
        path.rename(self.path / name)


def kept(workspace: Workspace | None) -> str:
    """What an interrupted run leaves, and what the same command will do; None: it had not begun to write."""
    if workspace is None or not workspace.rows:
        return "nothing is kept, as no step was finished; run the same again to start over"
    if workspace.done(COMPLETE):
        return "everything is written; " + ("run the same again to finish" if workspace.path.exists() else "it is done")
    return f"{workspace.path} keeps the {_steps(workspace)} so far; run the same again to continue"


def found(workspace: Workspace) -> str | None:
    """Whether a run continues what an earlier one has left, and why it does not; None where there is nothing left."""
    if not workspace.found:
        return None
    if workspace.done(COMPLETE):
        return f"continues {workspace.path}, where everything is written already"
    if workspace.rows:
        return f"continues {workspace.path}, which has {_steps(workspace)} already"
    return f"starts over: the earlier run in {workspace.path} had finished no shard and no layer"


def _steps(workspace: Workspace) -> str:
    """Such as "3 finished layers and 1 finished shard"."""
    layers = sum(name.endswith(LAYER_SUFFIX) for name in workspace.rows)
    counts = {"layer": layers, "shard": len(workspace.rows) - layers}
    named = [f"{count} finished {what}{'s' * (count != 1)}" for what, count in counts.items() if count]
    return " and ".join(named)


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes in a safetensors file; dtypes that are not listed take one byte a value."""
    return _BYTES.get(dtype, 1) * torch.Size(shape).numel()


def _difference(key: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    if key == "source":
        old, new = before.get(key) or {}, now.get(key) or {}
        changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
        return f"another SRC ({changed[0]} differs)"
    return f"{key} {before.get(key)} instead of {now.get(key)}"
