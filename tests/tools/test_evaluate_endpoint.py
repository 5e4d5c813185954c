"""`kvcompile evaluate ... --endpoint`: what servers are asked, how answers count, and what is wrong in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tools import quantize_sources as sources
from tests.tools.fake_endpoint import FakeEndpoint, served, tokens

from kvcompile import cli
from kvcompile.tools.evaluate_retrieval_served import contained
from kvcompile.tools.evaluate_samples import Sample
from kvcompile.tools.prose import prose
from kvcompile.tools.server import free_port


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources.write(tmp_path_factory.mktemp("evaluate") / "model")


def _text(prompt: list[int]) -> str:
    places = {token: byte for byte in range(128) for token in tokens(chr(byte))}
    return bytes(places.get(token, 63) for token in prompt).decode()


def _knows(body: dict[str, Any]) -> str:
    """A model that finds the number that is asked for, as long as no budget takes it away."""
    if body.get("vllm_xargs", {}).get("kv_budget_tokens"):
        return "I do not know."
    text = _text(body["prompt"])
    key = re.search(r"magic number for (\S+) mentioned", text)[1]
    return "It is " + re.search(rf"magic numbers for {key} is (\d+)", text)[1]


def _retrieval(checkpoint: Path, *options: str | Path, length: str = "500") -> int:
    common = ["--plain", "--task", "single", "--length", length, "--samples", "3"]
    return cli.main(["evaluate", "retrieval", str(checkpoint), *common, *map(str, options)])


def _rows(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["case"], row["system"], row["metric"]): row for row in rows}


def test_one_pruned_server_gives_quality_against_budget(checkpoint: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"quality.{name}" for name in ("json", "markdown", "plot")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    with served(_knows, prunes=True) as fake:
        asked = ("--endpoint", f"ours={fake.url}/v1/", "--budget", "50%", "--budget", "100", "--budget", "4096")
        assert _retrieval(checkpoint, *asked, *options) == 0
        bodies = fake.bodies()
    rows = _rows(files["json"])
    for position in ("last", "first", "later"):
        for budget in ("50 %", "100 tokens"):
            case = f"{position}, {budget}"
            assert rows[case, "ours, whole", "contained"]["mean"] == 1
            assert rows[case, "ours", "contained"]["mean"] == 0 and rows[case, "ours", "difference"]["mean"] == -1
            assert rows[f"{case}, single", "ours", "contained"]["runs"] == 3
        assert rows[f"{position}, 4096 tokens", "ours", "contained"]["mean"] == 1
    extra = [body["vllm_xargs"] for body in bodies]
    assert extra.count({"kv_prune": "false"}) == 9 + 9 and extra.count({"kv_budget_tokens": 100}) == 9
    shares = [body["vllm_xargs"].get("kv_budget_tokens") for body in bodies if len(body["prompt"]) == 500]
    assert shares.count(250) == 6
    assert all(body["model"] == "small" and body["temperature"] == 0 for body in bodies)
    assert {body["max_tokens"] for body in bodies} == {128}
    assert "| ours, whole | 1.000" in files["markdown"].read_text() and "<svg" in files["plot"].read_text()


def test_a_prompt_ends_before_the_reply_and_a_later_turn_holds_the_whole_chat(checkpoint: Path) -> None:
    with served(_knows) as fake:
        assert _retrieval(checkpoint, "--endpoint", fake.url, "--concurrency", "1") == 0
        texts = [_text(body["prompt"]) for body in fake.bodies()]
    assert all(text.endswith("\n\nAnswer:") for text in texts)
    assert not any("vllm_xargs" in body for body in fake.bodies())
    last, first, later = texts[:3]
    assert len(last) == len(first) == 500 < len(later)
    assert "Answer: I have read the text.\n\nWhat is the special magic number" in later
    assert last.count("What is the special") == first.count("What is the special") == 1


def test_two_servers_are_compared_on_the_same_samples(checkpoint: Path, tmp_path: Path, capsys) -> None:
    with served(_knows) as stock, served(lambda body: "no", prunes=True) as ours:
        endpoints = ("--endpoint", f"stock={stock.url}", "--endpoint", f"ours={ours.url}")
        for budget in ((), ("--budget", "50%")):
            stock.asked.clear()
            ours.asked.clear()
            assert _retrieval(checkpoint, *endpoints, *budget, "--json", tmp_path / "x.json") == 0
            prompts = [sorted(body["prompt"] for body in fake.bodies()) for fake in (stock, ours)]
            assert len(prompts[0]) == 9 and prompts[1] == sorted(prompts[0] * (2 if budget else 1))
            assert not any("vllm_xargs" in body for body in stock.bodies())
            rows, case = _rows(tmp_path / "x.json"), "first, 50 %" if budget else "first, as served"
            difference = rows[case, "ours", "difference"]
            assert (difference["mean"], difference["mean_low"], difference["mean_high"]) == (-1, -1, -1)
            assert (case, "stock", "difference") not in rows
    assert "paired difference from stock" in " ".join(capsys.readouterr().out.split())


def test_as_many_requests_are_under_way_as_asked_for(checkpoint: Path) -> None:
    for concurrency in (1, 3):
        with served(_knows, hold_s=0.1) as fake:
            assert _retrieval(checkpoint, "--endpoint", fake.url, "--concurrency", str(concurrency)) == 0
            assert fake.most_at_once == concurrency


def test_an_answer_counts_by_the_wanted_texts_that_it_contains() -> None:
    sample = Sample("multi-value", "last", [], [], [], [], 0, ("123", "RED  fox", "77", "9"))
    assert contained("It is 77,\n the red\nFox and 12 3", sample) == 0.5


def test_perplexity_is_that_of_the_log_probabilities_and_compared(checkpoint: Path, tmp_path: Path) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "x.json"
    text.write_text(prose()[:1600], encoding="utf-8")
    with served(nats=2.0) as stock, served(nats=2.5) as ours:
        endpoints = ("--endpoint", f"stock={stock.url}", "--endpoint", f"ours={ours.url}")
        assert cli.main(["evaluate", "perplexity", str(checkpoint), str(text), *endpoints, "--json", str(target)]) == 0
        assert [len(body["prompt"]) for body in stock.bodies()] == [512] * 3
    rows = _rows(target)
    assert rows["text.txt", "stock", "nll"]["mean"] == 2 and rows["text.txt", "ours", "nll"]["runs"] == 3
    assert rows["text.txt", "ours", "perplexity"]["mean"] == 12.1825
    assert rows["text.txt", "ours", "difference"]["mean"] == 0.5 and ("text.txt", "stock", "difference") not in rows


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--served-model", "gone"], "--served-model gone: {url} serves small, other"),
        (
            ["--budget", "50%"],
            "--budget: {url} do not prune, by their /metrics; serve with --compilation-config kvcompile, ",
        ),
        (["--method", "tova"], "--method is for a model in this process; leave it out, or leave --endpoint out"),
        (["--processes", "2"], "--processes is for a model in this process"),
        (["--task", "continuation"], "--task continuation has no answer that a served text could contain"),
        (["--answer-tokens", "0"], "--answer-tokens 0; allowed is 1 or more"),
        (["--concurrency", "0"], "--concurrency 0; allowed is 1 or more"),
        (["--timeout", "0"], "--timeout 0.0; allowed is more than 0, up to 86400, a day"),
        (["--timeout", "inf"], "--timeout inf; allowed is more than 0"),
        (["--served-model", ""], "--served-model : {url} serves small, other"),
        (["--json", "x", "--plot", "x"], "--plot x: --json is written there; name another"),
        (["--against", "other"], "--against other: allowed are 127.0.0.1:"),
        (["--endpoint", "{url}"], "--endpoint: two are called 127.0.0.1:"),
        (["--endpoint", "{url}", "--endpoint", "{url}"], "--endpoint is given 3 times; allowed are one and two"),
        (["--endpoint", "localhost:8000"], "--endpoint localhost:8000; allowed is a URL such as http://127.0.0.1:8000"),
        (["--length", "4090"], "--length 4090: 4218 tokens with question and answer; the server takes 4096"),
        (["--length", "99999999"], "--length 99999999: the server takes 4096, question and answer included"),
    ],
)
def test_what_is_wrong_is_one_line(checkpoint: Path, options: list[str], line: str, capsys) -> None:
    with served() as fake:
        given = [option.format(url=fake.url) for option in options]
        assert _retrieval(checkpoint, "--endpoint", fake.url, *given) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"kvcompile: error: {line.format(url=fake.url)}") and error.count("\n") == 1
        assert not fake.bodies()


def _answers(text: str) -> Callable[[FakeEndpoint], None]:
    """Generations are answered with this, whatever was asked."""

    def wrong(fake: FakeEndpoint) -> None:
        whole = fake.post
        fake.post = lambda path, body: whole(path, body) if path == "/tokenize" else (200, text)

    return wrong


def _lists(text: str) -> Callable[[FakeEndpoint], None]:
    """/v1/models is answered with this."""
    return lambda fake: setattr(fake, "get", lambda path: (200, text))


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda fake: setattr(fake, "status", 400), "/v1/completions answers 400: not this way"),
        (lambda fake: setattr(fake, "offset", 1), "small has not the tokenizer of "),
        (_lists("{}"), "/v1/models lists no model; give a vLLM server"),
        (_lists('{"data": [{"id": "a", "max_model_len": "4096"}]}'), "/v1/models lists no model; give a vLLM server"),
        (_lists('{"data": [{"id": 5}]}'), "/v1/models lists no model; give a vLLM server"),
        (_lists("x"), "/v1/models does not answer: Expecting value"),
        (_lists("[" * 100_000), "/v1/models does not answer: its JSON is nested too deep"),
        (lambda fake: setattr(fake, "get", lambda path: (401, "key?")), "/v1/models answers 401: key?"),
        (_answers('{"choices": []}'), "the answer of /v1/completions has not what vLLM's has (IndexError"),
        (_answers('{"choices": [{"text": 5}]}'), "the answer of /v1/completions has not what vLLM's has (TypeError"),
    ],
)
def test_a_server_that_refuses_or_is_another_is_one_line(checkpoint: Path, wrong, line: str, capsys) -> None:
    with served() as fake:
        wrong(fake)
        assert _retrieval(checkpoint, "--endpoint", fake.url) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile: error: --endpoint {fake.url}: {line}") and error.count("\n") == 1


def test_log_probabilities_that_are_not_finite_are_one_line(checkpoint: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose()[:1600], encoding="utf-8")
    with served(nats=float("nan")) as fake:
        assert cli.main(["evaluate", "perplexity", str(checkpoint), str(text), "--endpoint", fake.url]) == 2
    assert "(ValueError('log-probabilities of mean nan')); give a vLLM server\n" in capsys.readouterr().err


def test_whether_a_server_prunes_is_known_or_told(checkpoint: Path, capsys) -> None:
    with served(_knows, prunes=True) as fake:
        fake.metrics_status = 404  # no such page: none of ours
        assert _retrieval(checkpoint, "--endpoint", fake.url) == 0
        fake.metrics_status = 503
        capsys.readouterr()
        assert _retrieval(checkpoint, "--endpoint", fake.url) == 2
        line = "/metrics answers 503, so whether it prunes is not known; allowed are 200 and 404"
        assert capsys.readouterr().err == f"kvcompile: error: --endpoint {fake.url}: {line}\n"


def test_a_server_that_is_down_is_one_line(checkpoint: Path, capsys) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert _retrieval(checkpoint, "--endpoint", url) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcompile: error: --endpoint {url}: /v1/models does not answer: ") and "refused" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--served-model=x", "--concurrency=2", "--timeout=3", "--answer-tokens=9"])
def test_options_of_endpoints_without_one_are_one_line(checkpoint: Path, option: str, capsys) -> None:
    assert _retrieval(checkpoint, option) == 2
    name = option.partition("=")[0]
    assert capsys.readouterr().err == (
        f"kvcompile: error: {name} is for a served model; give --endpoint too, or leave it out\n"
    )


def test_a_server_with_too_few_tokens_for_a_window_is_one_line(checkpoint: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose()[:1600], encoding="utf-8")
    with served(limit=512) as fake:
        assert cli.main(["evaluate", "perplexity", str(checkpoint), str(text), "--endpoint", fake.url]) == 2
    assert "--max-model-len 512 is served; needed are 513, a window and a token" in capsys.readouterr().err
