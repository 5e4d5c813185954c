"""Questions of a file: hidden among the passages of the others, measured as the other tasks are."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from tests.tools import quantize_sources

from kvcompile import cli
from kvcompile.tools import evaluate_questions
from kvcompile.tools.evaluate_questions import Asked
from kvcompile.tools.evaluate_text import generated

PEOPLE = {"Ann": "Rome", "Bo": "Oslo", "Cy": "Lima"}
LINES = [
    {"context": f"{who} lives in {at}.", "question": f"Where is {who}?", "answer": at} for who, at in PEOPLE.items()
]


def _file(folder: Path, lines: list[object] = LINES) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_a_passage_stands_among_those_of_the_other_questions(tmp_path: Path) -> None:
    questions = evaluate_questions.read(_file(tmp_path))
    material = evaluate_questions.task(questions)(Random(0), generated)
    (asked,) = [each for each in questions if each.question in material.question]
    assert material.facts == [asked.context] and material.answers == [asked.answer]
    around = [next(material.filler) for _ in range(6)]
    others = [each.context for each in questions if each is not asked]
    assert sorted(around) == sorted(3 * others)


def test_questions_about_one_passage_are_hidden_in_other_text() -> None:
    questions = [Asked("Ann is in Rome.", "Who?", "Ann"), Asked("Ann is in Rome.", "Where?", "Rome")]
    material = evaluate_questions.task(questions)(Random(0), lambda rng: iter(["Other text."]))
    assert list(material.filler) == ["Other text."]


def _retrieval(folder: Path, *options: str | Path) -> int:
    return cli.main(["evaluate", "retrieval", str(folder), "--plain", *map(str, options)])


def test_questions_are_measured_as_the_other_tasks_are(tmp_path: Path) -> None:
    model, target = quantize_sources.write(tmp_path / "model"), tmp_path / "x.json"
    asked = ("--questions", _file(tmp_path), "--task", "questions", "--position", "last", "--length", "400")
    few = ("--samples", "2", "--method", "tova", "--budget", "50%")
    assert _retrieval(model, *asked, *few, "--json", target) == 0
    rows = json.loads(target.read_text())["rows"]
    assert {row["system"]: row["runs"] for row in rows if row["case"] == "last, 50 %, questions"} == {
        "full": 2,
        "tova": 2,
    }


@pytest.mark.parametrize(
    ("lines", "options", "line"),
    [
        (LINES, ("--task", "single"), "--task questions and --questions FILE belong together; give both or neither"),
        (["x"], (), "--questions {file}, line 1 is no JSON: "),
        ([LINES[0], {"question": "Who?"}], (), "--questions {file}, line 2: context, question, answer are not all "),
        ([LINES[0], {**LINES[1], "answer": " "}], (), "--questions {file}, line 2: context, question, answer are not "),
        ([[]], (), "--questions {file}, line 1: context, question, answer are not all given as text"),
        ([""], (), "--questions {file} is empty; give lines of "),
    ],
)
def test_a_file_that_has_no_questions_is_one_line(tmp_path: Path, lines, options, line: str, capsys) -> None:
    file = _file(tmp_path, lines)
    assert _retrieval(tmp_path, "--questions", file, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile: error: {line.format(file=file)}") and error.count("\n") == 1


def test_a_task_without_its_questions_is_one_line(tmp_path: Path, capsys) -> None:
    assert _retrieval(tmp_path, "--task", "questions") == 2
    assert "--task questions and --questions FILE belong together" in capsys.readouterr().err
    assert _retrieval(tmp_path, "--questions", tmp_path / "no") == 2
    assert f"--questions {tmp_path / 'no'} cannot be read as UTF-8 text" in capsys.readouterr().err
