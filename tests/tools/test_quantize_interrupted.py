"""Ctrl-C, and the run after it: each says what is kept, and whether it continues or starts over."""

import pytest
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.tools import quantize_steps
from kvcompile.tools.quantize_output import Workspace
from kvcompile.tools.quantize_source import Source


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("text " * 200)
    return file


def _interrupted_after(monkeypatch, steps, command):
    """The lines on standard error of a run in which Ctrl-C is pressed once so many steps are complete."""
    finish = Workspace.finish

    def stopping(self, step, rows):
        finish(self, step, rows)
        if len(self.rows) == steps:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "finish", stopping)
        assert cli.main(command) == 130


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (1, "1 finished layer"),
        (2, "2 finished layers"),
        (3, "2 finished layers and 1 finished shard"),
        (4, "2 finished layers and 2 finished shards"),
    ],
)
def test_an_interruption_is_told_with_what_is_kept_and_the_next_run_says_that_it_continues(
    tmp_path, monkeypatch, capsys, text, steps, kept
):
    source, part = sources.write(tmp_path / "s", shards=3), tmp_path / "o.part"
    command = ["quantize", str(source), str(tmp_path / "o"), "--calibration", str(text)]
    _interrupted_after(monkeypatch, steps, command)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        f"quantize: interrupted: {part} keeps the {kept} so far; run the same again to continue"
    )
    assert cli.main(command) == 0
    assert capsys.readouterr().err.splitlines()[0] == f"quantize: continues {part}, which has {kept} already"


@pytest.mark.parametrize("moment", ["identity", "check_finite", "read"])
def test_before_the_first_step_nothing_is_kept(tmp_path, monkeypatch, capsys, moment):
    source = sources.write(tmp_path / "s")
    command = ["quantize", str(source), str(tmp_path / "o"), "--method", "rtn"]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Source, moment, stop)
        assert cli.main(command) == 130
    assert capsys.readouterr().err.splitlines() == [
        "quantize: interrupted: nothing is kept, as no step was finished; run the same again to start over"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert cli.main(command) == 0
    assert "start" not in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_step_is_said_to_start_over(tmp_path, monkeypatch, capsys):
    class Killed(BaseException):
        """Nothing in here catches it, as it would be with SIGKILL."""

    def kill(*_):
        raise Killed

    command = ["quantize", str(sources.write(tmp_path / "s")), str(tmp_path / "o"), "--method", "rtn"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(quantize_steps, "write_shards", kill)
        cli.main(command)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        f"quantize: starts over: the earlier run in {tmp_path / 'o.part'} had finished no shard and no layer"
    )


def test_a_run_that_has_only_its_end_to_do_says_so(tmp_path, monkeypatch, capsys):
    command = ["quantize", str(sources.write(tmp_path / "s")), str(tmp_path / "o"), "--method", "rtn"]
    _interrupted_after(monkeypatch, 2, command)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "quantize: interrupted: everything is written; run the same again to finish"
    )
    assert cli.main(command) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        f"quantize: continues {tmp_path / 'o.part'}, where everything is written already"
    )
