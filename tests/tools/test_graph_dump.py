"""The command around a compilation, which is played here: its log, and what goes wrong beside it."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.tools.graph_documents import document

from kvcompile import cli
from kvcompile.config import UsageError
from kvcompile.tools import graph_dump


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], None]:
    """`compiled(end)`: a compilation writes two lines of log and then ends so: with a document, or an error."""
    monkeypatch.chdir(tmp_path)

    def play(end: Any) -> None:
        def compile_model(console: Console, model: str, flags: list[str], scratch: Path, log: Path) -> Any:
            log.write_text("one\ntwo\n")
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(graph_dump, "_compile", compile_model)

    return play


@pytest.mark.parametrize("end", [document(), UsageError("no such model"), None], ids=["dump", "refused", "failed"])
def test_the_log_is_kept_whatever_happens(compiled: Callable[[Any], None], tmp_path: Path, end: Any) -> None:
    compiled(end)
    (tmp_path / "log").write_text("of before, and longer")
    code = cli.main(["graph-dump", "a-model", "--keep-log", "log"])
    assert code == (1 if end is None else 2 if isinstance(end, UsageError) else 0)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_log_that_cannot_be_written_after_all_hides_neither_the_error_nor_the_dump(
    compiled: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    copy = shutil.copyfile

    def full(source: Any, target: Path) -> Any:
        if target.name == "kept.log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    lost = "kvcompile graph-dump: --keep-log kept.log: the log could not be written (No space left on device)\n"
    compiled(UsageError("no such model"))
    assert cli.main(["graph-dump", "a-model", "--keep-log", "kept.log"]) == 2
    assert capsys.readouterr().err == f"{lost}kvcompile: error: no such model\n"
    compiled(document())
    assert cli.main(["graph-dump", "a-model", "--keep-log", "kept.log"]) == 0
    assert capsys.readouterr().err == lost
    assert (tmp_path / "kvcompile-graphs" / "graphs.json").exists()


def test_a_place_for_the_log_is_tried_before_anything_is_compiled_and_nothing_is_left_there(
    compiled: Callable[[Any], None], tmp_path: Path, capsys: Any
) -> None:
    compiled(AssertionError("compiled"))
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["graph-dump", "a-model", "--keep-log", "pipe"]) == 2
    assert "is a pipe; name a file" in capsys.readouterr().err
    assert cli.main(["graph-dump", "a-model", "--keep-log", "x" * 300]) == 2
    assert "cannot be written (File name too long)" in capsys.readouterr().err
    graph_dump._refuse_unwritable(tmp_path / "log", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_dump_that_cannot_be_put_in_its_place_is_one_line_and_exit_code_2(
    compiled: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def busy(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    compiled(document())
    monkeypatch.setattr(Path, "rename", busy)
    assert cli.main(["graph-dump", "a-model", "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvcompile: error: --out out: the dump cannot be written there (Device or resource busy);")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_named_like_markup_is_said_as_it_is(
    compiled: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    compiled(document())
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(graph_dump.webbrowser, "open", lambda address: False)
    assert cli.main(["graph-dump", "a-model", "--out", "[red]:fire:", "--open-report"]) == 0
    out = capsys.readouterr().out
    assert "Written: [red]:fire:\n" in out
    assert "open [red]:fire:/report.html yourself." in out


def test_the_last_line_of_a_log_is_found_without_reading_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 40 + b"\n")
    with log.open("ab") as file:
        file.truncate(32 << 20)
        file.seek(0, io.SEEK_END)
        file.write(b"\nlayer [/v2]: 1 of 2\n")
    tracemalloc.start()
    try:
        assert graph_dump._last_line(log) == "layer [/v2]: 1 of 2"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    log.write_bytes(b"")
    assert graph_dump._last_line(log) == ""


def test_an_empty_model_is_refused(compiled: Callable[[Any], None], tmp_path: Path, capsys: Any) -> None:
    compiled(AssertionError("nothing is to be compiled"))
    assert cli.main(["graph-dump", ""]) == 2
    assert capsys.readouterr() == (
        "",
        "kvcompile: error: the model is empty; give a checkpoint folder or a hub name, or --diff A B\n",
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["./nowhere"], "model ./nowhere: no such folder; give the folder of a Hugging Face checkpoint or a hub name"),
        (
            ["some/where/else"],
            "model some/where/else: no such folder; give the folder of a Hugging Face checkpoint or a hub name",
        ),
        (["file"], "model file: is a file; give the folder of a Hugging Face checkpoint"),
        (["."], "model .: the folder has no config.json; give a Hugging Face checkpoint"),
        (["a-model", "--enforce-eager"], "--enforce-eager is given, with which nothing is compiled; leave it out"),
        (
            ["a-model", "--no-enforce-eager", "--enforce_eager"],
            "--enforce-eager is given, with which nothing is compiled; leave it out",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_vllm_is_loaded(
    compiled: Callable[[Any], None], tmp_path: Path, capsys: Any, arguments: list[str], line: str
) -> None:
    (tmp_path / "file").write_text("x")
    compiled(AssertionError("nothing is to be compiled"))
    assert cli.main(["graph-dump", *arguments]) == 2
    assert capsys.readouterr() == ("", f"kvcompile: error: {line}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_eager_mode_that_is_switched_off_again_is_no_obstacle(compiled: Callable[[Any], None]) -> None:
    compiled(document())
    assert cli.main(["graph-dump", "a-model", "--enforce-eager", "--no-enforce-eager"]) == 0
