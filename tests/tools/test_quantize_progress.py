"""The time left that `kvcompile quantize` shows: by work, not by the number of tensors, and only of what is left."""

import pytest
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.tools import quantize_progress, quantize_steps
from kvcompile.tools.quantize_output import Workspace
from kvcompile.tools.quantize_progress import Estimate, progress
from kvcompile.tools.quantize_source import Source


class _Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(quantize_progress.time, "monotonic", lambda: self.now)


def _report(clock, estimate, seconds, units):
    clock.now += seconds
    estimate.advance(units)


def test_there_is_no_estimate_from_what_loads_and_compiles_nor_from_next_to_nothing(monkeypatch):
    clock = _Clock(monkeypatch)
    estimate = Estimate(1000)
    assert estimate.left() is None
    _report(clock, estimate, 600, 50)  # a layer, and all that is to be loaded before it
    assert estimate.left() is None
    _report(clock, estimate, 1, 1)  # a norm
    assert estimate.left() is None
    _report(clock, estimate, 25, 50)
    assert estimate.left() == 0.5 * 899


def test_the_time_left_is_by_the_median_of_the_last_and_runs_down_by_one_of_them(monkeypatch):
    clock = _Clock(monkeypatch)
    estimate = Estimate(100)
    for seconds in (50, 4, 4, 90, 4):  # one was held up
        _report(clock, estimate, seconds, 1)
    assert estimate.left() == 4 * 95
    clock.now += 3
    assert estimate.left() == 4 * 95 - 3
    clock.now += 100
    assert estimate.left() == 4 * 94
    for _ in range(30):
        _report(clock, estimate, 2, 1)  # what is long ago says nothing of now
    assert estimate.left() == 2 * 65


def test_nothing_is_left_at_the_end(monkeypatch):
    clock = _Clock(monkeypatch)
    estimate = Estimate(3)
    for _ in range(3):
        _report(clock, estimate, 5, 1)
    clock.now += 1
    assert estimate.left() == 0.0


def test_lines_are_few_and_have_the_time_left(monkeypatch, capsys):
    clock = _Clock(monkeypatch)
    with progress("writing shards", 1000) as advance:
        for _ in range(10):
            clock.now += 60
            advance(50)
            clock.now += 1
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0] == "quantize: writing shards: 10 %, 17 min 59 s left"


def test_a_line_before_there_is_an_estimate_has_none(monkeypatch, capsys):
    clock = _Clock(monkeypatch)
    with progress("perplexity", 2) as advance:
        for _ in range(2):
            clock.now += 60
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "quantize: perplexity: 50 %",
        "quantize: perplexity: 100 %, 0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_times_are_short(seconds, shown):
    assert quantize_progress._time(seconds) == shown


def _job(folder, method):
    source = Source(folder)
    return quantize_steps.Job(source, method, "64", source.group_sizes(64))


@pytest.mark.parametrize(("method", "share"), [("rtn", 0.005), ("search", 0.0005)])
def test_embeddings_are_next_to_nothing_beside_weights_that_are_quantised(tmp_path, method, share):
    job = _job(sources.write(tmp_path / "s"), method)
    kinds = job.source.shards["model.safetensors"]
    work = {name: quantize_steps._work(job, name, kind) for name, kind in kinds.items()}
    assert 0 < work["model.embed_tokens.weight"] < share * sum(work.values())


@pytest.mark.parametrize("method", ["rtn", "search", "gptq"])
def test_all_work_is_told_and_none_of_it_twice_when_a_run_is_continued(tmp_path, monkeypatch, method):
    source = sources.write(tmp_path / "s", shards=3)
    text = tmp_path / "text.txt"
    text.write_text("text " * 200)
    arguments = ["--method", method, *(["--calibration", str(text)] if method == "gptq" else [])]
    told = []

    class Counted(Estimate):
        def __init__(self, total):
            super().__init__(total)
            told.append(self)

    finish, stop_after = Workspace.finish, 1

    def stopping(self, step, rows):
        finish(self, step, rows)
        if len(self.rows) == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(quantize_progress, "Estimate", Counted)
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "finish", stopping)
        assert cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments]) == 130
    first = [estimate.total for estimate in told]
    told.clear()
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), *arguments]) == 0
    assert [estimate.done for estimate in told] == [estimate.total for estimate in told]
    assert told[0].total == first[0]  # all of it is checked again
    assert 0 < told[1].total < first[1]
