"""`kvcompile bench decode`: its arguments, its table and its record, with a server that takes no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcompile.cli import main
from kvcompile.tools import bench_decode
from kvcompile.tools.server import ServerError


class _Server:
    """Counts requests instead of serving them."""

    started: list[list[str]] = []
    requests: list[dict[str, Any]] = []

    def __init__(self, model: str, arguments: list[str], *, log: Path) -> None:
        self.command = ["vllm", "serve", model, *arguments]

    def __enter__(self) -> _Server:
        self.started.append(self.command)
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_until_ready(self, timeout_s: float) -> None: ...

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        return {}


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[_Server]:
    _Server.started, _Server.requests = [], []
    monkeypatch.setattr(bench_decode, "VllmServer", _Server)
    return _Server


def test_both_systems_get_the_same_arguments_but_for_the_flag_and_neither_prunes(
    server: type[_Server], model: str
) -> None:
    assert main(["bench", "decode", "--model", model, "--batch", "2", "--runs", "1"]) == 0
    stock, ours = server.started
    assert "--compilation-config" not in stock
    flag = ["--compilation-config", "kvcompile", "-cc.kvcompile.prune.enabled=false"]
    assert ours == [*stock[:3], *flag, *stock[3:]]


def test_the_record_has_a_row_per_system_and_metric_of_one_case(
    server: type[_Server], model: str, tmp_path: Path
) -> None:
    target = tmp_path / "decode.json"
    options = ["--batch", "2", "--prompt-tokens", "5", "--output-tokens", "4", "--runs", "3", "--json", str(target)]
    assert main(["bench", "decode", "--model", model, *options]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(r["case"], r["system"], r["metric"], r["runs"]) for r in rows] == [
        ("decode 2x5", system, metric, 3)
        for system in ("vllm-bf16", "kvcompile")
        for metric in ("tpot_p50", "output_throughput")
    ]
    # Per system: a warm-up, then three times one token and five tokens, each by both requests at once.
    assert [b["max_tokens"] for b in server.requests] == [5, 5, *[1, 1, 5, 5] * 3] * 2
    assert {len(b["prompt"]) for b in server.requests} == {5}


@pytest.mark.parametrize("option", ["--batch", "--prompt-tokens", "--output-tokens", "--runs"])
def test_a_count_below_one_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", option, "0"]) == 2
    assert capsys.readouterr().err == f"kvcompile: error: {option} is 0; allowed is 1 or more\n"


def test_a_record_into_a_missing_folder_is_refused_before_anything_runs(
    server: type[_Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err
    assert server.started == []


def test_a_server_that_fails_is_reported_and_gives_exit_code_1(
    server: type[_Server], model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: _Server, timeout_s: float) -> None:
        raise ServerError("the server ended with exit code 3")

    monkeypatch.setattr(server, "wait_until_ready", fail)
    assert main(["bench", "decode", "--model", model]) == 1
    assert capsys.readouterr().err == "kvcompile bench: the server ended with exit code 3\n"


def test_a_model_that_is_no_checkpoint_is_refused_before_anything_runs(
    server: type[_Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", "--model", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"kvcompile: error: --model {tmp_path / 'nowhere'}: no folder with a ")
    assert server.started == []


def _positions(model: str, **changes: Any) -> None:
    file = Path(model, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 20, **changes}))


def test_requests_longer_than_the_model_are_refused_before_anything_runs(
    server: type[_Server], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _positions(model)
    options = ["--model", model, "--prompt-tokens", "12", "--output-tokens"]
    assert main(["bench", "decode", *options, "8"]) == 2
    assert capsys.readouterr().err == (
        "kvcompile: error: --prompt-tokens 12 and --output-tokens 8 are 21 tokens with the first one; the model holds "
        "20; lower one of the two\n"
    )
    assert server.started == []
    assert main(["bench", "decode", *options, "7"]) == 0


def test_of_scaled_positions_vllm_speaks_itself(server: type[_Server], model: str) -> None:
    _positions(model, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert main(["bench", "decode", "--model", model, "--prompt-tokens", "30"]) == 0


def test_the_cache_holds_the_batch_twice_over_in_bf16(server: type[_Server], model: str) -> None:
    assert (
        main(["bench", "decode", "--model", model, "--batch", "3", "--prompt-tokens", "7", "--output-tokens", "4"]) == 0
    )
    for command in server.started:
        given = int(command[command.index("--kv-cache-memory-bytes") + 1])
        # 3 layers, keys and values, 2 heads of 64, 2 bytes; up to two blocks of 128 tokens are begun per request.
        assert given == 2 * 3 * (7 + 4 + 1 + 256) * 3 * 2 * 2 * 64 * 2
