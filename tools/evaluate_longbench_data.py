"""LongBench and LongBench-E from a local copy in the published format: samples, prompt formats, lengths of answers.

DATA holds TASK.jsonl, of LongBench-E TASK_e.jsonl; beside them, or in a folder `config`, the published
dataset2prompt.json and dataset2maxlen.json. No text of the data set is part of kvcompile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_tokenizer
from kvcompile.tools.evaluate_endpoint import Question
from kvcompile.tools.evaluate_longbench_metrics import METRICS, NO_METRIC

# Their prompts are examples to go on with, which no chat template stands around.
_PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_ONE_LINE = "samsum"  # whose answer ends with its line
_BUCKETS = ((4000, "0-4k"), (8000, "4-8k"))  # of LongBench-E, by the sample's `length`, in words
_LAST_BUCKET = "8k+"
BUCKETS = (*(name for _, name in _BUCKETS), _LAST_BUCKET)
_FIELDS = {"input": str, "context": str, "answers": list, "length": int}


class Sample(NamedTuple):
    """One line of a task's file."""

    task: str
    fields: dict[str, str]  # that a prompt format may name: input, context
    answers: list[str]
    classes: list[str]
    length: int

    @property
    def bucket(self) -> str:
        """Of LongBench-E."""
        return next((name for end, name in _BUCKETS if self.length < end), _LAST_BUCKET)


class Task(NamedTuple):
    """prompt: a format with {context} and {input}. max_tokens: of an answer."""

    name: str
    prompt: str
    max_tokens: int
    samples: list[Sample]


def available(folder: Path, extended: bool) -> tuple[list[str], list[str]]:
    """Tasks whose files are there: those with a metric, and those without. extended: of LongBench-E.

    Raises UsageError if there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"DATA {folder}: no such folder; give a local copy of LongBench")
    there = [[name for name in names if _file(folder, name, extended).is_file()] for names in (METRICS, NO_METRIC)]
    if not any(there):
        raise UsageError(f"DATA {folder} has no file such as {_file(folder, 'hotpotqa', extended).name}")
    return there[0], there[1]


def read_tasks(folder: Path, names: Sequence[str], extended: bool, most: int | None) -> list[Task]:
    """The tasks' first `most` samples with what the published configuration says of them.

    Raises UsageError for a file that is not there or not in the published format.
    """
    prompts = _config(folder, "dataset2prompt.json")
    lengths = _config(folder, "dataset2maxlen.json")
    tasks = []
    for name in names:
        prompt, max_tokens = prompts.get(name), lengths.get(name)
        if not isinstance(prompt, str) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise UsageError(
                f"DATA {folder}: dataset2prompt.json and dataset2maxlen.json have {prompt!r} and {max_tokens!r} for "
                f"{name}; allowed are a text and a number of tokens, as published"
            )
        tasks.append(Task(name, prompt, max_tokens, _samples(_file(folder, name, extended), name, most)))
    return tasks


def question(task: Task, sample: Sample, tokenizer: Any, most: int, chat: bool) -> Question:
    """The prompt as published: of one longer than `most` tokens, the middle is left out; a chat where that is used.

    Raises UsageError for a prompt format with other fields than {context} and {input}.
    """
    try:
        text = task.prompt.format(**sample.fields)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(f"dataset2prompt.json: the prompt of {task.name} cannot be filled in ({error!r})") from error
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > most:
        half = most // 2
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        ids = tokenizer(text, verbose=False)["input_ids"]
    chat = chat and task.name not in _PLAIN
    stop = (tokenizer("\n", add_special_tokens=False)["input_ids"][-1],) if task.name == _ONE_LINE else ()
    if chat:
        return Question(text, len(evaluate_tokenizer.chat(tokenizer, text)), task.max_tokens, True, stop)
    return Question(list(ids), len(ids), task.max_tokens, False, stop)


def _file(folder: Path, task: str, extended: bool) -> Path:
    return folder / f"{task}{'_e' if extended else ''}.jsonl"


def _samples(file: Path, task: str, most: int | None) -> list[Sample]:
    samples: list[Sample] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}; get it again") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and (most is None or len(samples) < most):
            samples.append(_sample(f"{file}, line {number}", task, line))
    if not samples:
        raise UsageError(f"{file} has no sample; get it again")
    return samples


def _sample(where: str, task: str, line: str) -> Sample:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}; get the file again") from error
    for name, kind in _FIELDS.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise UsageError(f"{where}: {name} is missing or no {kind.__name__}; give the published format")
    answers, classes = found["answers"], found.get("all_classes") or []
    if not answers or not all(isinstance(text, str) for text in [*answers, *classes]):
        raise UsageError(f"{where}: answers and all_classes are not lists of text; give the published format")
    return Sample(task, {name: found[name] for name in ("context", "input")}, answers, classes, found["length"])


def _config(folder: Path, name: str) -> dict[str, Any]:
    for file in (folder / name, folder / "config" / name):
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is no JSON: {error}; get it again") from error
        if isinstance(found, dict):
            return found
        raise UsageError(f"{file} is no JSON object; get it again")
    raise UsageError(f"DATA {folder} has no {name}; put the published one there, or into a folder config in it")
