"""`kvcompile demo`: bad arguments are refused before anything starts, and a signal leaves no process behind."""

from __future__ import annotations

import functools
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvcompile.cli import main
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
