"""A small data set in LongBench's published format; its texts and prompt formats are the tests' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROMPTS = {
    "hotpotqa": "Passages:\n{context}\nAsked: {input}\nReply:",
    "samsum": "Talk:\n{context}\n{input}",
    "trec": "{context}\n{input}",
    "lcc": "Code:\n{context}Next:\n",
    "passage_count": "How many differ?\n{context}\n{input}",
    "dureader": "{context}{input}",
}
MOST = {"hotpotqa": 32, "samsum": 128, "trec": 64, "lcc": 64, "passage_count": 24, "dureader": 128}


def sample(
    context: str, asked: str, answers: list[str], *, classes: list[str] | None = None, length: int = 100
) -> dict[str, Any]:
    return {
        "input": asked,
        "context": context,
        "answers": answers,
        "length": length,
        "dataset": "any",
        "language": "en",
        "all_classes": classes,
        "_id": f"{len(context)}-{asked}",
    }


def write(folder: Path, tasks: dict[str, list[dict[str, Any]]], *, extended: bool = False, config: bool = True) -> Path:
    """Make `folder` a copy of the data set with these tasks."""
    folder.mkdir(exist_ok=True)
    for task, samples in tasks.items():
        file = folder / f"{task}{'_e' if extended else ''}.jsonl"
        file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in samples), encoding="utf-8")
    if config:
        (folder / "config").mkdir(exist_ok=True)
        (folder / "config" / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
        (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(MOST))
    return folder
