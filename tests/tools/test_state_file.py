"""What a run has found so far is whole, whoever added it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcompile.config import UsageError
from kvcompile.tools.state_file import StateFile


def _read(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    StateFile(path, {"tokens": (1, 2)}, "answers", entries.append)
    return entries


def test_entries_that_are_added_at_once_are_all_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json.state"
    files = [StateFile(path, {"tokens": (1, 2)}, "answers", lambda _: None) for _ in range(4)]
    entries = [{"number": number, "text": str(number) * 9000} for number in range(100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda entry: files[entry["number"] % 4].append(entry), entries))
    assert sorted(_read(path), key=lambda entry: entry["number"]) == entries


def test_a_line_that_was_cut_short_is_left_out_and_what_comes_after_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json.state"
    StateFile(path, {"tokens": (1, 2)}, "answers", lambda _: None).append({"number": 1})
    with path.open("a") as file:
        file.write('{"num')
    assert _read(path) == [{"number": 1}]
    StateFile(path, {"tokens": (1, 2)}, "answers", lambda _: None).append({"number": 2})
    assert _read(path) == [{"number": 1}, {"number": 2}]


def test_a_first_line_that_was_cut_short_is_nothing_kept_and_another_file_is_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.json.state"
    for text in ("", '{"ident', '{"identity": {"tok'):
        path.write_text(text)
        assert _read(path) == []
        assert path.read_text() == '{"identity": {"tokens": [1, 2]}}\n'
    path.write_text("mine")
    with pytest.raises(UsageError, match="does not hold what a run left"):
        _read(path)
    assert path.read_text() == "mine"


def test_what_another_process_writes_to_is_refused_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.json.state"
    code = (
        "import pathlib, sys; from kvcompile.tools.state_file import StateFile;"
        "StateFile(pathlib.Path(sys.argv[1]), {'tokens': (1, 2)}, 'answers', print).append({'number': 1});"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert any("ready" in line for line in other.stdout)
        with pytest.raises(UsageError, match="is being written by another run; wait for it, or name another --json"):
            _read(path)
    assert _read(path) == [{"number": 1}]


def test_a_file_that_cannot_be_written_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json.state").symlink_to(tmp_path / "nowhere" / "x")
    with pytest.raises(UsageError, match="cannot be written .No such file or directory."):
        _read(tmp_path / "x.json.state")
    file = StateFile(tmp_path / "y.json.state", {}, "answers", lambda _: None)
    monkeypatch.setattr("os.write", lambda *_: 3)
    with pytest.raises(UsageError, match="cannot be written .No space left on device."):
        file.append({"number": 1})
