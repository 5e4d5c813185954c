"""A user's mistake with `vllm serve --compilation-config kvcompile`: one line, no stack trace, exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvcompile.tools.server import group_alive
from tests.e2e.w4a8_model import write_plain, write_quantised


def _serve(model: str | Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """(exit code, standard error) of a server that must not start."""
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", str(model), "--compilation-config", "kvcompile", *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a mistake that was not refused has started a server
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in output + error, error[-4000:]
    assert not group_alive(process.pid)
    return process.returncode, error


@pytest.fixture(scope="module")
def results(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[tuple[int, str], tuple[str, ...]]]]:
    """Every mistake, made once: name -> ((exit code, standard error), parts of the one line that answers it).

    Two at a time: starting the command costs some fifteen seconds of imports, whatever the mistake.
    """
    folder = tmp_path_factory.mktemp("bad-input")
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps(gpt2))
    (folder / "kv.toml").write_text("[kv8]\nenable = true\n")
    nowhere = folder / "nowhere"
    bare = "--skip-tokenizer-init"
    damaged = write_quantised(folder / "w4a8", write_plain(folder / "plain"))
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.group_scales"]
    save_file(tensors, damaged / "model.safetensors")
    with socket.socket() as holder, ThreadPoolExecutor(2) as pool:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        cases = {
            "missing checkpoint": ((nowhere,), {}, (str(nowhere), "no such folder")),
            "unknown hub name": (("nobody/no-such-model",), {}, ("nobody/no-such-model",)),
            "architecture": (
                (folder, bare),
                {},
                ("GPT2LMHeadModel", "LlamaForCausalLM", "without --compilation-config"),
            ),
            "port": ((tiny_llama, "--host", "127.0.0.1", "--port", port), {}, (f"port {port}", "in use", "--port")),
            "unknown key": (
                (tiny_llama, bare),
                {"KVCOMPILE_CONFIG": str(folder / "kv.toml")},
                ("kv8.enable", "kv.toml", "kv8.enabled"),
            ),
            "value out of range": (
                (tiny_llama, bare),
                {"KVCOMPILE_OFFLOAD_LAZY_GPU_FREE_TRIGGER": "1.5"},
                ("offload.lazy_gpu_free_trigger", "1.5", "0", "1"),
            ),
            "memory": (
                (tiny_llama, bare, "--load-format", "dummy", "--kv-cache-memory-bytes", str(100 << 10)),
                {},
                ("too little memory", "512 tokens", "--max-model-len"),
            ),
            "damaged W4A8": (
                (damaged, bare),
                {},
                ("no tensor model.layers.1.mlp.up_proj.group_scales", "quantise or copy it anew"),
            ),
        }
        assert list(cases) == CASES
        futures = {name: pool.submit(_serve, *command, **variables) for name, (command, variables, _) in cases.items()}
        yield {name: (future.result(), cases[name][2]) for name, future in futures.items()}


CASES = [
    "missing checkpoint",
    "unknown hub name",
    "architecture",
    "port",
    "unknown key",
    "value out of range",
    "memory",
    "damaged W4A8",
]


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_answered_by_one_line_that_names_it_and_exit_code_2(
    name: str, results: dict[str, tuple[tuple[int, str], tuple[str, ...]]]
) -> None:
    (code, error), parts = results[name]
    assert code == 2, error[-4000:]
    lines = [line for line in error.splitlines() if line.startswith("kvcompile: error: ")]
    assert len(lines) == 1, error[-4000:]
    for part in parts:
        assert part in lines[0]
