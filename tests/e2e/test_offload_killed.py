"""A server that is killed while it copies leaves nothing, and the next one is as if it had never been."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcompile.tools.server import ServerError, VllmServer, group_alive
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

REQUESTS, NEW = 12, 120
OPTIONS = {"offload": {"enabled": True, "cpu_bytes_to_use": 8 << 20}}
ARGUMENTS = (
    *("--compilation-config", json.dumps({"kvcompile": OPTIONS, "mode": 0}), "--enforce-eager"),
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "16", "--max-model-len", "256"),
    *("--max-num-seqs", "12", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(32 << 20)),
    *("--num-gpu-blocks-override", "50"),
)


def _ask(server: VllmServer, index: int) -> list[int]:
    sampling = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": list(range(3 + index, 63 + index)), "sampling_params": sampling}
    return server.post("/inference/v1/generate", body)["choices"][0]["token_ids"]


def _shared(group: int) -> set[Path]:
    """Files of shared memory that processes of this group have mapped."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[2]) == group:
                maps = status.with_name("maps").read_text()
                found |= {Path(line) for line in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def _kill(server: VllmServer) -> list[int]:
    """End it as the kernel does. Sizes of the shared memory that is left, which is given back then."""
    group = server._process.pid
    shared = _shared(group)
    os.killpg(group, signal.SIGKILL)
    while group_alive(group):
        time.sleep(0.1)
    left = [path for path in shared if path.exists()]
    sizes = sorted(path.stat().st_size for path in left)
    for path in left:
        path.unlink()
    return sizes


def test_a_server_killed_while_it_copies_leaves_nothing_and_starts_again(tiny_llama: Path, tmp_path: Path) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "model")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    without = ("--compilation-config", json.dumps({"kvcompile": {}, "mode": 0}), *ARGUMENTS[2:])
    with VllmServer(model, without, log=tmp_path / "without.log", environment=environment) as server:
        server.wait_until_ready(600)
        # By itself vLLM leaves the queues between its processes.
        left_by_vllm = _kill(server)
    with (
        VllmServer(model, ARGUMENTS, log=tmp_path / "killed.log", environment=environment) as server,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        server.wait_until_ready(600)
        alone = _ask(server, 0)

        def ask_on(index: int) -> None:
            """Until the server is gone."""
            with contextlib.suppress(ServerError, ConnectionError):
                while True:
                    _ask(server, index)

        asking = [pool.submit(ask_on, index) for index in range(REQUESTS)]
        while server.counted("offload_restores") < 3:
            time.sleep(0.2)
        left = _kill(server)
        for each in asking:
            each.result(timeout=60)
        port = server.port
    assert left == left_by_vllm
    with VllmServer(model, ARGUMENTS, log=tmp_path / "next.log", port=port, environment=environment) as server:
        server.wait_until_ready(600)
        assert server.counted("offload_bytes") == 0
        with ThreadPoolExecutor(REQUESTS) as pool:
            first, *_ = pool.map(lambda index: _ask(server, index), range(REQUESTS))
        assert first == alone
        assert server.counted("offload_restores") > 0
