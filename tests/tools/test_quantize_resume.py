"""Runs of `kvcompile quantize` that are stopped: OUT is whole or absent, and the same command continues."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.tools import quantize_steps
from kvcompile.tools.prose import prose
from kvcompile.tools.quantize_output import MANIFEST, Workspace


class _Killed(BaseException):
    """Ends a run where no handler of kvcompile catches it, as a signal would."""


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(prose()[:1100], encoding="utf-8")
    return file


def _stop_after(monkeypatch, steps):
    """Let a run raise _Killed as soon as so many steps are complete; counts the tensors that are read until then."""
    finish = Workspace.finish

    def finish_and_stop(self, step, rows):
        finish(self, step, rows)
        if len(self.rows) == steps:
            raise _Killed

    monkeypatch.setattr(Workspace, "finish", finish_and_stop)


def _content(folder):
    """All files of OUT; of the report what is no measurement, as the last bits of a sum depend on where it lies."""
    report = json.loads((folder / "kvcompile_quantize.json").read_text(), parse_float=lambda digits: "measured")
    return {**sources.hashes(folder), "kvcompile_quantize.json": report}


@pytest.mark.parametrize("method", ["rtn", "search", "gptq"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_stopped_run_is_continued_and_gives_the_same(tmp_path, monkeypatch, text, method, steps):
    source = sources.write(tmp_path / "s", shards=4)
    arguments = ["--method", method, *(["--calibration", str(text)] if method == "gptq" else [])]
    assert cli.main(["quantize", str(source), str(tmp_path / "straight"), *arguments]) == 0
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        _stop_after(patch, steps)
        cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments])
    assert not (tmp_path / "o").exists()
    part = tmp_path / "o.part"
    done = {file.name: file.stat().st_mtime_ns for file in part.glob("*.safetensors")}
    assert len(done) == steps
    finished = []
    finish = Workspace.finish
    monkeypatch.setattr(Workspace, "finish", lambda self, step, rows: finished.append(step) or finish(self, step, rows))
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments]) == 0
    assert not done.keys() & set(finished), "a finished step was done again"
    assert not part.exists()
    assert _content(tmp_path / "o") == _content(tmp_path / "straight")


def test_a_run_stopped_in_the_middle_of_a_shard_writes_that_shard_anew(tmp_path, monkeypatch):
    source = sources.write(tmp_path / "s", shards=2)
    reads = iter(range(9))

    def read(self, name):
        if next(reads, None) is None:
            raise _Killed
        return original(self, name)

    original = quantize_steps.Source.read
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(quantize_steps.Source, "check_finite", lambda self, advance: None)
        patch.setattr(quantize_steps.Source, "read", read)
        cli.main(["quantize", str(source), str(tmp_path / "o")])
    assert not list((tmp_path / "o.part").glob("*.safetensors"))
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 0
    assert not list((tmp_path / "o").glob("*.tmp"))
    assert len(sources.read(tmp_path / "o")) == len(sources.tensors()) + 3 * len(sources.linear_names())


@pytest.mark.parametrize("moment", ["unlink", "rename"])
def test_a_run_stopped_at_its_very_end_has_only_that_to_do_again(tmp_path, monkeypatch, text, moment):
    source = sources.write(tmp_path / "s")
    arguments = ["quantize", str(source), str(tmp_path / "o"), "--calibration", str(text)]
    act = getattr(Path, moment)

    def stop(self, *args, **kwargs):
        if moment == "unlink" or args[0] == tmp_path / "o":
            raise _Killed
        return act(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(Path, moment, stop)
        cli.main(arguments)
    assert not (tmp_path / "o").exists()
    with monkeypatch.context() as patch:
        patch.setattr(quantize_steps, "calibrate_layers", None)
        patch.setattr(quantize_steps, "write_shards", None)
        assert cli.main(arguments) == 0
    assert sorted(sources.hashes(tmp_path / "o")) == [
        "config.json",
        "generation_config.json",
        "kvcompile_quantize.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_killed_process_leaves_nothing_that_looks_finished_and_is_continued(tmp_path):
    source = sources.write(tmp_path / "s", shards=4)
    slow = (
        "import sys, time; from kvcompile import cli; from kvcompile.tools.quantize_output import Workspace\n"
        "finish = Workspace.finish\n"
        "def slow(self, step, rows): finish(self, step, rows); time.sleep(60)\n"
        "Workspace.finish = slow\n"
        "cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", slow, "quantize", str(source), str(tmp_path / "o"), "--method", "rtn"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "o.part").glob("*.safetensors")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
        assert cli.main(command[3:]) == 2, "two runs at once"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "o").exists()
    assert cli.main(command[3:]) == 0
    assert cli.main(["quantize", str(source), str(tmp_path / "straight"), "--method", "rtn"]) == 0
    assert _content(tmp_path / "o") == _content(tmp_path / "straight")


def _stopped(tmp_path, monkeypatch, *arguments):
    source = sources.write(tmp_path / "s", shards=2)
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        _stop_after(patch, 1)
        cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments])
    return source


@pytest.mark.parametrize(
    ("arguments", "differs"),
    [
        (["--method", "search"], "--method rtn instead of search"),
        (["--method", "rtn", "--group-size", "64"], "--group-size 128 instead of 64"),
    ],
)
def test_other_arguments_do_not_continue_a_run(tmp_path, monkeypatch, capsys, arguments, differs):
    source = _stopped(tmp_path, monkeypatch, "--method", "rtn")
    capsys.readouterr()
    kept = sources.hashes(tmp_path / "o.part")
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments]) == 2
    err = capsys.readouterr().err
    assert differs in err and "remove the folder" in err and err.count("\n") == 1
    assert sources.hashes(tmp_path / "o.part") == kept


def test_a_changed_source_does_not_continue_a_run(tmp_path, monkeypatch, capsys):
    source = _stopped(tmp_path, monkeypatch)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizer"}')
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 2
    assert "another SRC (tokenizer_config.json differs)" in capsys.readouterr().err


def test_a_full_disk_is_told_and_what_is_done_stays(tmp_path, monkeypatch, capsys):
    source = sources.write(tmp_path / "s", shards=2)
    write = Workspace.write_tensors

    def full(self, name, entries, tensors):
        if self.rows:
            raise OSError(28, "No space left on device")
        write(self, name, entries, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "write_tensors", full)
        assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in err and "to continue" in err
    assert json.loads((tmp_path / "o.part" / MANIFEST).read_text())["steps"]
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 0


@pytest.mark.parametrize("at", ["manifest", "first shard"])
def test_a_disk_that_is_full_at_the_first_file_leaves_nothing(tmp_path, monkeypatch, capsys, at):
    source = sources.write(tmp_path / "s")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Workspace, "write_json" if at == "manifest" else "write_tensors", full)
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_too_little_space_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    source = sources.write(tmp_path / "s")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 19))
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 2
    assert "0 MiB free and 2 MiB are needed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_finished_file_that_is_not_as_it_was_left_is_not_built_upon(tmp_path, monkeypatch, capsys, damage):
    source, out = sources.write(tmp_path / "s", shards=3), tmp_path / "o"
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        _stop_after(patch, 2)
        cli.main(["quantize", str(source), str(out), "--method", "rtn"])
    file = sorted((tmp_path / "o.part").glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:100])
    assert cli.main(["quantize", str(source), str(out), "--method", "rtn"]) == 2
    assert f"{file} is not what an earlier run left there" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path, capsys):
    source, part = sources.write(tmp_path / "s"), tmp_path / "o.part"
    part.mkdir()
    (part / "mine.tmp").write_text("mine")
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), "--method", "rtn"]) == 2
    assert "is not of a run of kvcompile quantize" in capsys.readouterr().err
    assert (part / "mine.tmp").read_text() == "mine"


def test_a_side_file_that_ends_in_tmp_is_copied_too(tmp_path):
    source = sources.write(tmp_path / "s")
    (source / "notes.tmp").write_text("keep")
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), "--method", "rtn"]) == 0
    assert (tmp_path / "o/notes.tmp").read_text() == "keep"
