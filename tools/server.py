"""A `vllm serve` process as a context manager: started as a user would, waited for, asked, stopped without remains."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcompile.config import UsageError
from kvcompile.tools import http_json


class ServerError(RuntimeError):
    """The server ended or did not answer in time; the message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refuse_unusable_port(port: int) -> None:
    """Raise `UsageError` unless `port` is one that a server can have on the loopback interface now."""
    if not 1 <= port <= 65535:
        raise UsageError(f"--port is {port}; allowed are 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; give another, or leave it out for a free one") from None


class VllmServer:
    """`vllm serve MODEL *arguments` on 127.0.0.1, in a process group of its own.

    `log`: file that takes the server's output. `environment`: variables on top of this process's own. Entering starts
    the process and returns at once; `wait_until_ready` blocks. Leaving ends every process of the group.
    """

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str] = (),
        *,
        log: Path,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        vllm = Path(sys.executable).with_name("vllm")
        self.command = [str(vllm), "serve", str(model), *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        # A checkpoint on disk needs no hub, and asking one that cannot be reached takes minutes.
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout_s: float, tick: Callable[[str], None] = lambda line: None) -> None:
        """Block until /health answers. `tick` gets the newest log line about twice a second. Raises `ServerError`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (code := self._running().poll()) is not None:
                raise ServerError(f"the server ended with exit code {code}:\n{self.log_tail()}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            tick(self.log_tail(1))
            time.sleep(0.5)
        raise ServerError(f"the server was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300) -> dict[str, Any]:
        """POST JSON, return JSON. An HTTP error raises `ServerError` with the server's own message."""
        try:
            return http_json.ask(self.url + path, body, timeout_s)
        except http_json.Refused as error:
            raise ServerError(f"POST {path}: {error}") from None
        except OSError as error:
            raise ServerError(f"POST {path}: {error}:\n{self.log_tail()}") from None

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def counted(self, name: str) -> int:
        """What all engines and labels of a counter of kvcompile's on /metrics add up to; 0 where it is not there."""
        found = re.findall(rf"^vllm:kvcompile_{name}_total\{{.*\}} (\S+)$", self.metrics(), re.MULTILINE)
        return int(sum(map(float, found)))

    def cache_info(self) -> dict[str, str]:
        """vLLM's own description of its KV cache (`vllm:cache_config_info` on /metrics): label -> value."""
        found = re.search(r"^vllm:cache_config_info\{(.*)\} ", self.metrics(), re.MULTILINE)
        if found is None:
            raise ServerError("/metrics has no vllm:cache_config_info")
        return dict(re.findall(r'(\w+)="([^"]*)"', found.group(1)))

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 30) -> None:
        """End the server and whatever it started: SIGTERM first, SIGKILL for what is left of its group. Idempotent."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
            deadline = time.monotonic() + 5  # its workers end with it; what hangs on gets no more than this
            while group_alive(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # also when a second signal interrupts the waiting
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while group_alive(process.pid):
            time.sleep(0.1)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not started")
        return self._process


def group_alive(group: int) -> bool:
    """Whether any process of the group is left (a zombie whose parent has not yet fetched it counts as gone)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name, which may hold spaces and brackets) state ppid pgrp ...
            state, _parent, pgrp, *_ = status.read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state != "Z":
                return True
    return False
