"""The server as a context manager: what it starts it ends, and what goes wrong it says with the log's last lines."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from kvcompile.tools.server import ServerError, VllmServer, free_port, group_alive

# Stands in for the `vllm` command: serves /health and /metrics, and leaves a child behind that ignores SIGTERM.
STUB = """
import http.server, subprocess, sys
print("stub starting", flush=True)
subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'# x\\nvllm:cache_config_info{block_size="16",num_gpu_blocks="7"} 1.0\\n')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        ok = self.path == "/echo"
        self.send_response(200 if ok else 404); self.end_headers()
        self.wfile.write(b'{"answer": 1}' if ok else b"no such path")
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _stub(tmp_path: Path, script: str) -> VllmServer:
    server = VllmServer("model", log=tmp_path / "log")
    server.command = [sys.executable, "-c", script, str(server.port)]
    return server


def test_the_command_is_what_a_user_would_type(tmp_path: Path) -> None:
    server = VllmServer("some/model", ["--compilation-config", "kvcompile"], log=tmp_path / "log", port=8123)
    assert Path(server.command[0]).name == "vllm"
    assert server.command[1:] == [
        "serve",
        "some/model",
        "--compilation-config",
        "kvcompile",
        "--host",
        "127.0.0.1",
        "--port",
        "8123",
    ]


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_a_running_server_answers_and_leaves_no_process_behind_even_one_that_ignores_sigterm(tmp_path: Path) -> None:
    with _stub(tmp_path, STUB) as server:
        group = server._running().pid
        lines: list[str] = []
        server.wait_until_ready(30, lines.append)
        assert server.post("/echo", {}) == {"answer": 1}
        assert server.cache_info() == {"block_size": "16", "num_gpu_blocks": "7"}
        assert group_alive(group)
    assert not group_alive(group)
    server.stop()  # a second time is harmless


def test_an_http_error_carries_the_server_s_own_message(tmp_path: Path) -> None:
    with _stub(tmp_path, STUB) as server:
        server.wait_until_ready(30)
        with pytest.raises(ServerError, match="POST /nowhere: 404: no such path"):
            server.post("/nowhere", {})


def test_a_server_that_ends_is_reported_with_its_exit_code_and_last_lines(tmp_path: Path) -> None:
    with (
        _stub(tmp_path, "import sys; print('first'); print('out of luck'); sys.exit(3)") as server,
        pytest.raises(ServerError, match=r"exit code 3:\nfirst\nout of luck"),
    ):
        server.wait_until_ready(30)


def test_a_server_that_never_answers_is_given_up_on_and_ended(tmp_path: Path) -> None:
    with _stub(tmp_path, "import time; print('thinking', flush=True); time.sleep(600)") as server:
        group = server._running().pid
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_until_ready(1)
    assert not group_alive(group)


def test_an_exception_inside_the_block_still_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _stub(tmp_path, STUB) as server:
        group = server._running().pid
        server.wait_until_ready(30)
        raise KeyboardInterrupt
    assert not group_alive(group)


def test_this_process_s_own_group_is_alive() -> None:
    assert group_alive(os.getpgrp())


def test_a_server_that_was_not_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="not started"):
        _stub(tmp_path, STUB).wait_until_ready(1)
