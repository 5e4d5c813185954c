"""Directories of built files: complete and verified, or absent, whatever happens to the processes that build them."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple

import pytest

from kvcompile.config import UsageError
from kvcompile.tools import checked_dir

NAMES = frozenset({"a.txt", "b.bin"})
CONTENT = {"a.txt": b"text\n", "b.bin": bytes(range(256))}


class _Builder:
    """Builds CONTENT and records how often; `say` collects what a user would read."""

    def __init__(self):
        self.builds, self.lines = 0, []

    def __call__(self, into):
        self.builds += 1
        for name, content in CONTENT.items():
            (into / name).write_bytes(content)

    def ensure(self, directory, *, key="k1", size_bytes=1000, build=None):
        checked_dir.ensure(
            directory, key=key, names=NAMES, size_bytes=size_bytes, build=build or self, say=self.lines.append
        )


@pytest.fixture
def builder():
    return _Builder()


def _assert_complete(directory):
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.name in NAMES} == CONTENT
    assert checked_dir.fault(directory, "k1", NAMES) is None


def _leftovers(directory):
    return sorted(path.name for path in directory.parent.iterdir() if "building" in path.name)


def test_a_directory_is_built_once_and_then_reused_in_silence(tmp_path, builder):
    directory = tmp_path / "new" / "deep" / "d"
    builder.ensure(directory)
    builder.ensure(directory)
    _assert_complete(directory)
    assert (builder.builds, builder.lines, _leftovers(directory)) == (1, [], [])


def test_the_manifest_holds_size_and_sha256_of_every_file(tmp_path, builder):
    builder.ensure(tmp_path / "d")
    assert json.loads((tmp_path / "d" / checked_dir.MANIFEST).read_text()) == {
        "key": "k1",
        "files": {
            "a.txt": {"bytes": 5, "sha256": "b9e68e1bea3e5b19ca6b2f98b73a54b73daafaa250484902e09982e07a12e733"},
            "b.bin": {"bytes": 256, "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880"},
        },
    }


def _truncate(directory):
    (directory / "b.bin").write_bytes(CONTENT["b.bin"][:100])


def _flip_a_byte(directory):
    (directory / "b.bin").write_bytes(CONTENT["b.bin"][::-1])


def _lose_a_file(directory):
    (directory / "a.txt").unlink()


def _lose_the_manifest(directory):
    (directory / checked_dir.MANIFEST).unlink()


def _garble_the_manifest(directory):
    (directory / checked_dir.MANIFEST).write_bytes(b"\xff{")


def _replace_the_manifest(value):
    return lambda directory: (directory / checked_dir.MANIFEST).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "b.bin has 100 bytes instead of 256"),
        (_flip_a_byte, "b.bin is corrupt (its SHA-256 differs)"),
        (_lose_a_file, "a.txt is missing"),
        (_lose_the_manifest, "kvcompile-manifest.json is missing or unreadable"),
        (_garble_the_manifest, "kvcompile-manifest.json is missing or unreadable"),
        (_replace_the_manifest([]), "kvcompile-manifest.json is missing or unreadable"),
        (_replace_the_manifest({"key": "k1", "files": []}), "kvcompile-manifest.json is missing or unreadable"),
        (
            _replace_the_manifest({"key": "k1", "files": {}}),
            "kvcompile-manifest.json does not list the files that belong here",
        ),
    ],
)
def test_damage_is_told_in_one_line_and_built_anew(tmp_path, builder, damage, reason):
    directory = tmp_path / "d"
    builder.ensure(directory)
    damage(directory)
    builder.ensure(directory)
    _assert_complete(directory)
    assert builder.lines == [f"rebuilding {directory}: {reason}"]
    assert builder.builds == 2


def test_what_another_version_built_is_replaced(tmp_path, builder):
    builder.ensure(tmp_path / "d", key="k0")
    builder.ensure(tmp_path / "d")
    _assert_complete(tmp_path / "d")
    assert builder.builds == 2


def test_an_empty_directory_is_filled_without_a_word(tmp_path, builder):
    (tmp_path / "d").mkdir()
    builder.ensure(tmp_path / "d")
    _assert_complete(tmp_path / "d")
    assert builder.lines == []


def test_files_of_someone_else_are_never_removed(tmp_path, builder):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    with pytest.raises(
        UsageError, match=r"d holds 'thesis.tex', which is not part of a checkpoint; name a new or empty"
    ):
        builder.ensure(tmp_path / "d")
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "thesis.tex"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path, builder):
    (tmp_path / "d").write_text("mine")
    with pytest.raises(UsageError, match="d is a file; name a new or empty directory"):
        builder.ensure(tmp_path / "d")
    assert (tmp_path / "d").read_text() == "mine"


def test_a_build_that_fails_leaves_nothing(tmp_path, builder):
    def fail(into):
        (into / "a.txt").write_bytes(b"half")
        raise RuntimeError("converter fault")

    with pytest.raises(RuntimeError, match="converter fault"):
        builder.ensure(tmp_path / "d", build=fail)
    assert not (tmp_path / "d").exists()
    assert _leftovers(tmp_path / "d") == []
    builder.ensure(tmp_path / "d")
    _assert_complete(tmp_path / "d")


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied")]
)
def test_an_operating_system_error_becomes_one_line_with_a_remedy(tmp_path, builder, code, words):
    def fail(into):
        raise OSError(code, os.strerror(code))

    with pytest.raises(UsageError) as caught:
        builder.ensure(tmp_path / "d", build=fail)
    assert str(caught.value) == (
        f"cannot build {tmp_path / 'd'}: {words}; name a writable directory in KVCOMPILE_CACHE_DIR or with --out"
    )


def test_a_place_below_a_file_is_refused_by_name(tmp_path, builder):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot build .*/file/d: .*; name a writable directory"):
        builder.ensure(tmp_path / "file" / "d")


def test_a_place_that_cannot_be_created_is_refused_by_name(tmp_path, builder, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UsageError, match="cannot build .*: Permission denied; name a writable directory"):
        builder.ensure(tmp_path / "new" / "d")


def test_a_complete_directory_serves_from_a_place_that_cannot_be_written(tmp_path, builder, monkeypatch):
    builder.ensure(tmp_path / "d")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checked_dir, "FileLock", refuse)
    builder.ensure(tmp_path / "d")
    assert builder.builds == 1


def test_too_little_space_is_told_before_anything_is_built(tmp_path, builder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5 << 20))
    with pytest.raises(UsageError, match="has 5 MiB free and 8 MiB are needed; free some space, or name another"):
        builder.ensure(tmp_path / "d", size_bytes=(7 << 20) + 1)
    assert builder.builds == 0


_WORKER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from kvcompile.tools import checked_dir

    directory, log, pause_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

    def build(into):
        with log.open("a") as file:
            file.write("build\\n")
        (into / "a.txt").write_bytes(b"text\\n")
        time.sleep(pause_s)
        (into / "b.bin").write_bytes(bytes(range(256)))

    checked_dir.ensure(directory, key="k1", names=frozenset({"a.txt", "b.bin"}), size_bytes=1, build=build, say=print)
    """
)


def _start(directory, log, pause_s):
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(directory), str(log), str(pause_s)], stdout=subprocess.PIPE, text=True
    )


def test_of_processes_that_start_at_once_one_builds_and_the_others_wait(tmp_path):
    directory, log = tmp_path / "d", tmp_path / "log"
    workers = [_start(directory, log, 2.5) for _ in range(4)]
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
    _assert_complete(directory)
    assert log.read_text() == "build\n"
    assert sorted(outputs) == ["", *[f"waiting for another process that is building {directory}\n"] * 3]


def test_a_killed_build_leaves_nothing_that_looks_finished_and_the_next_cleans_up(tmp_path, builder):
    directory, log = tmp_path / "d", tmp_path / "log"
    worker = _start(directory, log, 60)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".d.building-*/a.txt")):
        assert worker.poll() is None and time.monotonic() < deadline, "the worker never began to build"
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert not directory.exists()
    assert checked_dir.fault(directory, "k1", NAMES) == "absent"
    assert len(_leftovers(directory)) == 1
    builder.ensure(directory)
    _assert_complete(directory)
    assert _leftovers(directory) == []
