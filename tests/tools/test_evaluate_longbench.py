"""`kvcompile evaluate longbench`: prompts and truncation as published, scores by task and length, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tools import longbench_sample, quantize_sources
from tests.tools.fake_endpoint import served, tokens
from tests.tools.longbench_sample import MOST, sample

from kvcompile import cli

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
QUESTIONS = [sample("Ann is in Rome.", "Where is Ann?", ["Rome"]), sample("Bo is in Oslo.", "Where is Bo?", ["Oslo"])]
TASKS = {
    "hotpotqa": QUESTIONS,
    "samsum": [sample("A: hello", "Summary:", ["They say hello"])],
    "trec": [sample("When? Type: Date", "Who? Type:", ["Person"], classes=["Date", "Person"])],
    "lcc": [sample("x = 1\n", "", ["y = 2"])],
    "passage_count": [sample("one", "two", ["2"])],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = quantize_sources.write(tmp_path_factory.mktemp("longbench") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _said(body: dict[str, Any]) -> str:
    """Right on every task but one of two questions, unless pruned."""
    if body.get("vllm_xargs", {}).get("kv_budget_tokens"):
        return ""
    if "messages" in body:
        asked = body["messages"][0]["content"]
        return "It is Rome" if "Ann" in asked else "there are 2" if "differ" in asked else "Paris"
    prompt = body["prompt"]
    for end, text in (("Type:", "Person\nMore"), ("Next:\n", "# a comment\ny = 2"), ("Summary:", "they say hello")):
        if prompt[-len(end) :] == tokens(end):
            return text
    raise AssertionError(prompt)


def _longbench(checkpoint: Path, data: Path, *options: str | Path) -> int:
    return cli.main(["evaluate", "longbench", str(checkpoint), str(data), *map(str, options)])


def _means(path: Path, metric: str = "score") -> dict[tuple[str, str], float]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["case"], row["system"]): row["mean"] for row in rows if row["metric"] == metric}


def test_each_task_has_its_score_and_all_together_the_mean_of_them(checkpoint: Path, tmp_path: Path, capsys) -> None:
    data = longbench_sample.write(tmp_path / "data", {**TASKS, "dureader": QUESTIONS})
    files = {name: tmp_path / f"quality.{name}" for name in ("json", "markdown", "plot")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    with served(_said, prunes=True) as fake:
        asked = ("--endpoint", f"ours={fake.url}", "--budget", "50%")
        assert _longbench(checkpoint, data, *asked, *options) == 0
    means, differences = _means(files["json"]), _means(files["json"], "difference")
    assert means["hotpotqa, 50 %", "ours, whole"] == 0.25  # F1 of "It is Rome" is a half, of "Paris" nothing
    for task, expected in {"samsum": 0.6667, "trec": 1, "lcc": 1, "passage_count": 1}.items():
        assert means[f"{task}, 50 %", "ours, whole"] == expected
        assert differences[f"{task}, 50 %", "ours"] == -expected
    assert means["all tasks, 50 %", "ours, whole"] == round((0.25 + 2 / 3 + 3) / 5, 4)
    out, err = capsys.readouterr()
    assert "left out, since their metric needs jieba: dureader" in err
    assert "| trec, 50 % | 1.000 (one sample) | 0.000 (one sample)" in files["markdown"].read_text()
    assert "all tasks" in files["plot"].read_text() and "question" not in files["plot"].read_text()
    assert "paired difference from ours, whole" in " ".join(out.split())


def test_prompts_are_the_published_ones_and_chats_where_those_are(checkpoint: Path, tmp_path: Path) -> None:
    data = longbench_sample.write(tmp_path / "data", TASKS)
    with served(_said) as fake:
        assert _longbench(checkpoint, data, "--endpoint", fake.url, "--samples", "1") == 0
        bodies = fake.bodies()
    chats = {body["messages"][0]["content"]: body for body in bodies if "messages" in body}
    assert set(chats) == {
        "Passages:\nAnn is in Rome.\nAsked: Where is Ann?\nReply:",
        "How many differ?\none\ntwo",
    }
    prompts = {tuple(body["prompt"]): body for body in bodies if "prompt" in body}
    texts = {"samsum": "Talk:\nA: hello\nSummary:", "lcc": "Code:\nx = 1\nNext:\n"}
    by_task = {task: prompts[tuple(tokens(text))] for task, text in texts.items()}
    assert {task: body["max_tokens"] for task, body in by_task.items()} == {task: MOST[task] for task in texts}
    assert by_task["samsum"]["stop_token_ids"] == tokens("\n") and by_task["samsum"]["min_tokens"] == 1
    assert "stop_token_ids" not in by_task["lcc"] and all("vllm_xargs" not in body for body in bodies)


def test_a_long_prompt_loses_its_middle_and_a_share_is_of_the_chat(checkpoint: Path, tmp_path: Path) -> None:
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": [sample("0123456789" * 9, "?", ["9"])]})
    with served(prunes=True) as fake:
        asked = ("--endpoint", fake.url, "--max-length", "41", "--budget", "50%")
        assert _longbench(checkpoint, data, *asked) == 0
        whole, half = fake.bodies()
    assert whole["messages"] == half["messages"]
    assert whole["messages"][0]["content"] == "Passages:\n0123456789" + "6789\nAsked: ?\nReply:"
    assert half["vllm_xargs"] == {"kv_budget_tokens": 22}  # of 40 tokens and the template's three


def test_longbench_e_is_by_length(checkpoint: Path, tmp_path: Path) -> None:
    lengths = (3999, 4000, 7999, 8000)
    questions = [sample("Ann is in Rome.", f"{n}?", ["It is Rome" if n < 8000 else "no"], length=n) for n in lengths]
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": questions}, extended=True)
    with served(_said) as fake:
        target = tmp_path / "x.json"
        assert _longbench(checkpoint, data, "--endpoint", f"a={fake.url}", "--e", "--json", target) == 0
    means = _means(target)
    assert [means[f"hotpotqa {bucket}, as served", "a"] for bucket in ("0-4k", "4-8k", "8k+")] == [1, 1, 0]
    assert means["all tasks 8k+, as served", "a"] == 0
    runs = {row["case"]: row["runs"] for row in json.loads(target.read_text())["rows"]}
    assert runs["hotpotqa 4-8k, as served"] == 2


def test_a_base_model_has_no_chats(checkpoint: Path, tmp_path: Path) -> None:
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": QUESTIONS})
    with served() as fake:
        assert _longbench(checkpoint, data, "--endpoint", fake.url, "--plain") == 0
        assert all("messages" not in body for body in fake.bodies())


def test_in_this_process_every_method_answers_at_every_budget(checkpoint: Path, tmp_path: Path) -> None:
    context = "Ann is in Rome, and Bo is in Oslo. " * 6
    tasks = {"hotpotqa": [sample(context, f"{n}?", ["Rome"]) for n in range(2)], "lcc": [sample(context, "", ["y"])]}
    data, target = longbench_sample.write(tmp_path / "data", tasks), tmp_path / "x.json"
    options = ("--method", "tova", "--method", "streaming", "--budget", "50%", "--budget", "512", "--device", "cpu")
    assert _longbench(checkpoint, data, *options, "--max-length", "220", "--json", target) == 0
    means = _means(target)
    cases = [f"{task}, {budget}" for task in ("all tasks", "hotpotqa", "lcc") for budget in ("50 %", "512 tokens")]
    assert set(means) == {(case, system) for case in cases for system in ("full", "tova", "streaming")}
    differences = _means(target, "difference")
    assert {system for _, system in differences} == {"tova", "streaming"}
    assert all(differences[case, "tova"] == 0 for case in cases if "512" in case)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--budget", "5%"],
            "--budget 5 %: 3 of a prompt's 56 tokens; the methods always keep 36; give a larger budget",
        ),
        (["--concurrency", "2"], "--concurrency is for a served model; give --endpoint too, or leave it out"),
        (["--against", "andpro"], "--against andpro: allowed are full; tova"),
        (["--max-length", "900"], "--max-length 900: the model takes 1024 tokens; 32 for an answer and 128 for a chat"),
        (["--endpoint", "http://127.0.0.1:1"], "--method is for a model in this process; leave it out, or leave "),
    ],
)
def test_what_is_wrong_in_this_process_is_one_line(
    checkpoint: Path, tmp_path: Path, options: list[str], line: str, capsys
) -> None:
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": QUESTIONS})
    assert _longbench(checkpoint, data, "--method", "tova", *options) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"kvcompile: error: {line}")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--task", "dureader"], "--task dureader: its published metric cuts Chinese text by jieba; leave it out"),
        (["--task", "qasper"], "--task qasper: DATA {data} has no file of it; there are hotpotqa, "),
        (["--samples", "0"], "--samples 0; allowed is 1 or more"),
        (["--max-length", "1"], "--max-length 1; allowed is 2 or more"),
        (["--max-length", "4000"], "--max-length 4000: the model takes 4096 tokens; 128 for an answer and 128"),
        (["--e"], "DATA {data} has no file such as hotpotqa_e.jsonl"),
        (["--budget", "50%"], "--budget: http"),
    ],
)
def test_what_is_wrong_is_one_line(checkpoint: Path, tmp_path: Path, options: list[str], line: str, capsys) -> None:
    data = longbench_sample.write(tmp_path / "data", TASKS)
    with served(_said) as fake:
        assert _longbench(checkpoint, data, "--endpoint", fake.url, *options) == 2
        assert not fake.bodies()
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile: error: {line.format(data=data)}") and error.count("\n") == 1


def _without_field(folder: Path) -> None:
    file = folder / "hotpotqa.jsonl"
    file.write_text(file.read_text() + json.dumps({"input": "", "context": "", "answers": ["x"]}) + "\n")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            lambda folder: (folder / "config" / "dataset2prompt.json").unlink(),
            "DATA {data} has no dataset2prompt.json;",
        ),
        (lambda folder: (folder / "dataset2maxlen.json").write_text("{}"), "DATA {data}: dataset2prompt.json and "),
        (lambda folder: (folder / "dataset2maxlen.json").write_text("["), "{data}/dataset2maxlen.json is no JSON: "),
        (
            lambda folder: (folder / "dataset2prompt.json").write_text('{"hotpotqa": "{x}"}'),
            "dataset2prom",
        ),
        (lambda folder: (folder / "hotpotqa.jsonl").write_text("\n"), "{data}/hotpotqa.jsonl has no sample; get it"),
        (lambda folder: (folder / "hotpotqa.jsonl").write_text("x"), "{data}/hotpotqa.jsonl, line 1 is no JSON: "),
        (_without_field, "{data}/hotpotqa.jsonl, line 3: length is missing or no int; give the published format"),
    ],
)
def test_a_copy_that_is_not_as_published_is_one_line(checkpoint: Path, tmp_path: Path, damage, line, capsys) -> None:
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": QUESTIONS})
    damage(data)
    with served(_said) as fake:
        assert _longbench(checkpoint, data, "--endpoint", fake.url) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile: error: {line.format(data=data)}") and error.count("\n") == 1


def test_a_chat_template_that_leaves_no_room_is_one_line_before_anything_is_asked(
    checkpoint: Path, tmp_path: Path, capsys
) -> None:
    talkative = quantize_sources.write(tmp_path / "talkative")
    (talkative / "chat_template.jinja").write_text("x" * 300 + TEMPLATE)
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": [sample("0123456789" * 400, "?", ["9"])]})
    with served() as fake:
        assert _longbench(talkative, data, "--endpoint", fake.url) == 2
        error = capsys.readouterr().err
        assert not fake.bodies()
    assert error == (
        "kvcompile: error: --max-length 3936: with chat template and answer the longest prompt has 4271 tokens; the "
        "model takes 4096; give less\n"
    )


def test_a_folder_that_is_not_there_and_a_tokenizer_without_a_template_are_one_line(
    checkpoint: Path, tmp_path: Path, capsys
) -> None:
    bare = quantize_sources.write(tmp_path / "bare")
    data = longbench_sample.write(tmp_path / "data", {"hotpotqa": QUESTIONS})
    with served(_said) as fake:
        for model, folder, line in (
            (checkpoint, tmp_path / "no", f"DATA {tmp_path / 'no'}: no such folder; give a local copy of LongBench"),
            (bare, data, f"{bare}: the tokenizer has no chat template; give --plain for prompts without one"),
        ):
            assert _longbench(model, folder, "--endpoint", fake.url) == 2
            assert capsys.readouterr().err == f"kvcompile: error: {line}\n"
