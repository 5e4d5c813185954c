"""What a run has found so far is whole, whoever added it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
