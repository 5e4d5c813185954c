"""The folder of a dump: whole or not at all, and never over somebody else's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvcompile import cli
from kvcompile.config import UsageError
from kvcompile.tools import graph_folder

OURS = '{\n "kind": "kvcompile graph-dump",\n "schema": 1'


def _fill(folder: Path) -> None:
    (folder / "graphs.json").write_text(OURS)
    (folder / "graph-1").mkdir()


def test_a_new_folder_an_empty_one_and_an_earlier_dump_are_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    graph_folder.replace(out, _fill)
    (out / "graph-9").mkdir()
    graph_folder.replace(out, _fill)
    assert sorted(path.name for path in out.iterdir()) == ["graph-1", "graphs.json"], "nothing of the earlier one stays"
    empty = tmp_path / "empty"
    empty.mkdir()
    graph_folder.replace(empty, _fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out"]


def test_a_failure_leaves_the_earlier_dump_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    graph_folder.replace(out, _fill)

    def fail(folder: Path) -> None:
        (folder / "graphs.json").write_text("half")
        raise OSError("disk full")

    with pytest.raises(UsageError, match=r"cannot be written there \(disk full\); name another place"):
        graph_folder.replace(out, fail)
    assert (out / "graphs.json").read_text() == OURS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _failing_rename(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Renaming a folder of one of these names fails."""
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name in names:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)


def test_where_the_new_dump_cannot_be_put_in_place_the_earlier_one_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    graph_folder.replace(out, _fill)
    (out / "graph-7").mkdir()
    _failing_rename(monkeypatch, "new")
    with pytest.raises(UsageError, match="Device or resource busy"):
        graph_folder.replace(out, _fill)
    assert sorted(path.name for path in out.iterdir()) == ["graph-1", "graph-7", "graphs.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_dump_that_cannot_be_put_back_either_is_kept_and_said_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    graph_folder.replace(out, _fill)
    _failing_rename(monkeypatch, "new", "old")
    with pytest.raises(UsageError) as caught:
        graph_folder.replace(out, _fill)
    kept = Path(str(caught.value).rpartition("the earlier dump is in ")[2])
    assert (kept / "graphs.json").read_text() == OURS


def test_a_folder_that_cannot_be_moved_away_is_left_and_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _failing_rename(monkeypatch, "out")
    with pytest.raises(UsageError, match="Device or resource busy"):
        graph_folder.replace(out, _fill)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("given", [".", "..", "../inner", "../../above/inner"])
def test_the_current_folder_and_those_that_hold_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    here = tmp_path / "above" / "inner"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(UsageError, match="is the current folder or holds it"):
        graph_folder.refuse_foreign(Path(given))
    assert Path.cwd() == here


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(UsageError, match="is a mount point"):
        graph_folder.refuse_foreign(tmp_path / "out")


def test_a_name_that_no_file_system_takes_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long; name another place"):
        graph_folder.refuse_foreign(tmp_path / ("x" * 300))


def _foreign_file(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("")


def _foreign_graphs(path: Path) -> None:
    path.mkdir()
    (path / "graphs.json").write_text('{"mine": 1}')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_foreign_file, "holds 'thesis.tex'"),
        (_foreign_graphs, "its graphs.json is not of a dump"),
        (lambda path: path.write_text(""), "is no folder"),
        (lambda path: path.symlink_to("elsewhere"), "is no folder"),
    ],
)
def test_what_is_not_a_dump_is_refused(tmp_path: Path, make: object, said: str) -> None:
    make(tmp_path / "out")
    with pytest.raises(UsageError, match=said):
        graph_folder.refuse_foreign(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model is given"),
        (["--dtype", "float16", "a-model"], "--dtype stands before the model"),
        (["a-model", "--out", "no/such/folder"], "no/such does not exist"),
        (["a-model", "--keep-log", "no/such/log"], "--keep-log no/such/log: cannot be written (No such file or"),
        (["a-model", "--keep-log", "."], "--keep-log .: cannot be written (Is a directory)"),
        (["a-model", "--keep-log", "kvcompile-graphs/log"], "is in kvcompile-graphs, which is written anew"),
        (["a-model", "--out", "."], "--out .: is the current folder"),
        (["a-\udcff-model"], "is no text in UTF-8"),
        (["a-model", "--diff", "a", "b"], "give it alone"),
        (["--diff", "a", "b", "--open-report"], "give it alone"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["graph-dump", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcompile: error: ")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
