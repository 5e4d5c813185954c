"""Files of an evaluation are written whole or not at all."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvcompile.tools import evaluate_report
from kvcompile.tools.evaluate_report import Drawing, Table
from kvcompile.tools.evaluate_statistics import row


@pytest.mark.parametrize("name", ["json", "markdown", "plot"])
def test_a_file_that_cannot_be_written_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = tmp_path / "x", [row("last, 50 %", "full", "rank1", "share", [0.0, 1.0])]
    target.write_text("of before")
    args = argparse.Namespace(**{**dict.fromkeys(("json", "markdown", "plot")), name: target})

    def full(path: Path, other: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            evaluate_report.publish(args, "x", rows, [Table("t", rows, "rank1")], Drawing("t", rows, "rank1"))
    assert target.read_text() == "of before"
    evaluate_report.publish(args, "x", rows, [Table("t", rows, "rank1")], Drawing("t", rows, "rank1"))
    assert "full" in target.read_text()
