"""`kvcompile demo`: bad arguments are refused before anything starts, and a signal leaves no process behind."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcompile.cli import main
from kvcompile.tools import demo
from kvcompile.tools.server import group_alive


@pytest.mark.parametrize("port", ["0", "-1", "70000"])
def test_a_port_out_of_range_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--port", port]) == 2
    assert capsys.readouterr().err == f"kvcompile: error: --port is {port}; allowed are 1 to 65535\n"


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"kvcompile: error: --port {port}: Address already in use; ")


@pytest.mark.parametrize("name", ["no/such/folder/log", "."])
def test_a_log_that_cannot_be_written_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--keep-log", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"kvcompile: error: --keep-log {tmp_path / name}: ")


class _Served:
    """What is left of a server that has pruned a document of 4,300 tokens, or has not."""

    def __init__(self, model: Path, counts: dict[str, int]) -> None:
        self.command, self._counts = ["vllm", "serve", str(model)], counts

    def cache_info(self) -> dict[str, str]:
        return {"num_gpu_blocks": "100", "block_size": "128", "cache_dtype": "int8_per_token_head"}

    def counted(self, name: str) -> int:
        return self._counts.get(name, 0)


@pytest.mark.parametrize(
    ("counts", "kept", "free"),
    [({"pruned_tokens": 2048, "prune_reclaimed_blocks": 16}, "2,252", 16), ({}, "4,300", 0)],
    ids=["pruned", "whole"],
)
def test_the_table_says_what_was_kept_of_the_document_and_what_came_free(
    counts: dict[str, int], kept: str, free: int, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    console = Console(width=120, record=True)
    demo._table(console, _Served(tmp_path, counts), 4300)
    (row,) = [line for line in console.export_text().splitlines() if "tokens kept of the document" in line]
    assert row.split("\u2502")[2].split() == ["4,300"]
    assert row.split("\u2502")[3].split() == [kept]
    assert row.split("\u2502")[4].strip() == f"{free} blocks free"


def test_the_table_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    console = Console(width=80, record=True)
    demo._table(console, _Served(tmp_path, {"pruned_tokens": 2048, "prune_reclaimed_blocks": 16}), 4301)
    rows = [line for line in console.export_text().splitlines() if line.startswith("\u2502")]
    assert rows and all(line.rstrip().endswith("\u2502") for line in rows)


class _Answering(_Served):
    """A server that says `text`, whatever it is asked; remembers what that was."""

    def __init__(self, model: Path, text: str) -> None:
        super().__init__(model, {})
        self.text, self.asked = text, {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked[path] = body
        choice = {"text": self.text, "message": {"content": self.text}}
        return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_the_demo_asks_for_a_number_that_the_document_has_and_says_whether_the_answer_is_right(
    smollm2_checkpoint: Path,
) -> None:
    asked = demo._hidden_number(smollm2_checkpoint)
    assert len(asked.tokens) == demo.DOCUMENT_TOKENS and asked.fact.endswith(f" is {asked.number}.")
    key = asked.question.removeprefix("What is the special magic number for ").partition(" ")[0]
    assert f" for {key} is " in asked.fact and 0 < asked.at < demo.DOCUMENT_TOKENS
    for text, verdict in ((f"It is {asked.number}.", "That is right."), ("7", f"That is wrong: it is {asked.number}.")):
        console, server = Console(width=120, record=True), _Answering(smollm2_checkpoint, text)
        assert demo._converse(console, server) == 7
        said = console.export_text()
        assert verdict in said and asked.question in " ".join(said.split())
        assert server.asked["/v1/completions"]["prompt"] == asked.tokens


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_server_that_a_command_has_started(number: signal.Signals, tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from kvcompile import cli
        from kvcompile.tools import demo
        from kvcompile.tools.server import VllmServer

        log = Path(sys.argv[1])

        def run(args):
            server = VllmServer("model", log=log)
            server.command = [sys.executable, "-c", "import time; time.sleep(600)"]
            with server:
                print(server._running().pid, flush=True)
                server.wait_until_ready(600)

        demo.run = run
        sys.argv[1:] = ["demo"]
        cli.command()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "log")]
    # Under nohup, or behind a shell's &, whoever runs the tests ignores some of these signals, and its children do too.
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        group = int(process.stdout.readline())
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else 128 + number)
    assert not group_alive(group)
