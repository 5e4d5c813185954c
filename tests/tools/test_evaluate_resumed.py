"""An evaluation that was interrupted goes on from the answers that it had, and no other takes them up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tools import longbench_sample
from tests.tools import quantize_sources as sources
from tests.tools.fake_endpoint import served
from tests.tools.longbench_sample import sample

from kvcompile import cli
from kvcompile.tools import evaluate_answering, evaluate_perplexity, evaluate_run, quantize_perplexity, record
from kvcompile.tools.evaluate_endpoint import Endpoint
from kvcompile.tools.prose import prose

QUESTIONS = [sample("Ann is in Rome. " * 9, f"{n}?", ["Rome"]) for n in range(3)]
GENERATED = ["--plain", "--task", "single", "--length", "500", "--position", "last", "--samples", "3"]
PRUNED = ["--method", "streaming", "--budget", "50%"]
SERVED = ["--endpoint", "ours={url}", "--concurrency", "1"]
# What is asked, and whose answers, one at a time, are kept.
WAYS: dict[str, tuple[list[str], Any, str]] = {
    "retrieval": (["retrieval", "{model}", *GENERATED, *PRUNED], evaluate_run, "outcomes"),
    "retrieval, served": (["retrieval", "{model}", *GENERATED, *SERVED], Endpoint, "answer"),
    "longbench": (["longbench", "{model}", "{data}", "--plain", *PRUNED], evaluate_answering, "by_system"),
    "longbench, served": (["longbench", "{model}", "{data}", "--plain", *SERVED], Endpoint, "answer"),
    "perplexity": (["perplexity", "{model}", "{text}"], quantize_perplexity, "losses"),
    "perplexity, served": (["perplexity", "{model}", "{text}", *SERVED], Endpoint, "nats"),
}
Evaluate = Callable[..., int]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "text.txt").write_text(prose()[:2100], encoding="utf-8")
    data = longbench_sample.write(folder / "data", {"hotpotqa": QUESTIONS})
    (data / "config" / "dataset2maxlen.json").write_text('{"hotpotqa": 3}')
    with served(lambda body: str(len(body["prompt"]))) as fake:
        yield {
            "model": str(sources.write(folder / "model")),
            "text": str(folder / "text.txt"),
            "data": str(data),
            "url": fake.url,
        }


@pytest.fixture
def evaluate(places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    monkeypatch.setattr(evaluate_perplexity, "_TOGETHER", 1)

    def run(way: str, *options: str, name: str = "x.json") -> int:
        given = [word.format(**places) for word in WAYS[way][0]]
        return cli.main(["evaluate", *given, "--json", str(tmp_path / name), *options])

    return run


def _counting(monkeypatch: pytest.MonkeyPatch, way: str, most: int | None = None) -> list[int]:
    """Counts, in one element, what is asked; the user interrupts what comes after `most`."""
    _, owner, name = WAYS[way]
    answer, count = getattr(owner, name), [0]

    def counted(*args: Any, **more: Any) -> Any:
        if count[0] == most:
            raise KeyboardInterrupt
        count[0] += 1
        return answer(*args, **more)

    monkeypatch.setattr(owner, name, counted)
    return count


@pytest.mark.parametrize("way", WAYS)
def test_what_was_answered_is_not_asked_again_and_the_record_is_that_of_one_run(
    way: str, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        whole = _counting(patch, way)
        assert evaluate(way, name="whole.json") == 0
    with monkeypatch.context() as patch:
        _counting(patch, way, most=2)
        assert evaluate(way) == 130
    state = tmp_path / "x.json.state"
    with state.open("a") as file:
        file.write('{"asked": "')  # as a killed process leaves it
    capsys.readouterr()
    rest = _counting(monkeypatch, way)
    assert evaluate(way) == 0
    assert f"{state} has 2 answers of this command; going on from them\n" in capsys.readouterr().err
    assert rest[0] == whole[0] - 2 and not state.exists()
    records = [json.loads((tmp_path / name).read_text()) for name in ("whole.json", "x.json")]
    assert [each["taken_up_answers"] for each in records] == [0, 2]
    assert records[0]["rows"] == records[1]["rows"]


def _refused(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.partition("made with another ")[2].partition("; repeat that command as it was, remove the file")[0]


def test_another_setting_is_refused_in_one_line_and_leaves_what_is_there(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        _counting(patch, "retrieval", most=1)
        assert evaluate("retrieval") == 130
    capsys.readouterr()
    before = (tmp_path / "x.json.state").read_text()
    asked = _counting(monkeypatch, "retrieval")
    for options, named in (
        (["--samples", "5"], "samples"),
        (["--budget", "20%"], "budget"),
        (["--method", "tova"], "method"),
    ):
        assert evaluate("retrieval", *options) == 2 and _refused(capsys) == named
    with monkeypatch.context() as patch:
        patch.setattr(record, "versions", lambda *_: {"torch": "9"})
        assert evaluate("retrieval") == 2 and _refused(capsys) == "package"
    assert asked == [0] and (tmp_path / "x.json.state").read_text() == before
    options = ["--seconds", "1e9", "--against", "full", "--markdown", str(tmp_path / "x.md")]
    assert evaluate("retrieval", *options) == 0 and asked == [2]  # no answer depends on these


def test_another_checkpoint_or_a_server_of_something_else_is_refused(
    evaluate: Evaluate,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        _counting(patch, "retrieval, served", most=1)
        assert evaluate("retrieval, served") == 130
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setitem(places, "model", str(sources.write(tmp_path / "other", tied=True)))
        assert evaluate("retrieval, served") == 2 and _refused(capsys) == "model, checkpoint"
    assert evaluate("retrieval, served", "--served-model", "other") == 2
    assert _refused(capsys) == "served_model, served"


def test_without_a_record_nothing_is_kept(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [word.format(**places) for word in WAYS["longbench, served"][0]]
    assert cli.main(["evaluate", *given]) == 0
    assert not list(tmp_path.iterdir())
