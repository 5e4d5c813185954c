"""Benchmark records have one shape, and are written whole."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvcompile.config import UsageError
from kvcompile.tools import record


def test_what_cannot_be_written_is_said_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record.check_target("--json", None)
    record.check_target("--json", tmp_path / "new.json")
    wrong = [(tmp_path, "a folder; give the name of a file")]
    wrong += [(Path("/dev/null"), "a device or a pipe, which a file would replace; give the name of a file")]
    wrong += [(tmp_path / "none" / "x.json", "the folder does not exist; create it or name another")]
    for path, reason in wrong:
        with pytest.raises(UsageError, match=re.escape(f"--json {path}: {reason}")):
            record.check_target("--json", path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UsageError, match="the folder cannot be written to; name another"):
        record.check_target("--json", tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_two_options_that_name_one_file_are_told(tmp_path: Path) -> None:
    record.check_targets({"--json": tmp_path / "x", "--markdown": tmp_path / "y", "--plot": None})
    same = tmp_path / ".." / tmp_path.name / "x"
    with pytest.raises(UsageError, match=re.escape(f"--plot {same}: --json is written there; name another")):
        record.check_targets({"--json": tmp_path / "x", "--markdown": tmp_path / "y", "--plot": same})
    with pytest.raises(UsageError, match="a folder"):
        record.check_targets({"--json": None, "--plot": tmp_path})


@pytest.mark.parametrize(("columns", "width"), [(None, 110), ("60", 110), ("200", 200)])
def test_a_pipe_or_a_narrow_terminal_does_not_cut_a_table(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert record.console().width == width


def test_a_row_holds_median_and_spread_of_its_runs() -> None:
    assert record.row("decode 8x512", "kvcompile", "tpot_p50", "ms", [3.0, 1.0, 2.0]) == {
        "case": "decode 8x512",
        "system": "kvcompile",
        "metric": "tpot_p50",
        "unit": "ms",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "runs": 3,
    }


def test_a_record_says_what_ran_where_and_how() -> None:
    row = record.row("c", "s", "time", "us", [1.0])
    made = record.record("decode", "kvcompile bench decode", [row])
    assert list(made) == ["name", "date", "gpu", "cpu", "versions", "command", "rows"]
    assert made["rows"] == [row]
    assert made["versions"]["torch"].startswith("2.11")
    assert made["versions"]["vllm"].startswith("0.23.0")
    assert "threads" in made["cpu"]


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "decode.json"
    target.write_text("old")
    record.write(target, {"name": "decode"})
    assert json.loads(target.read_text()) == {"name": "decode"}
    assert list(tmp_path.iterdir()) == [target]
