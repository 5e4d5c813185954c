"""A user's mistake with `vllm serve --compilation-config kvcompile`: one line, no stack trace, exit code 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.tools.server import group_alive


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
    output, error = process.communicate(timeout=240)
    assert "Traceback" not in output + error, error[-4000:]
    assert not group_alive(process.pid)
    return process.returncode, error


def _assert_one_line(result: tuple[int, str], *parts: str) -> None:
    code, error = result
    lines = [line for line in error.splitlines() if line.startswith("kvcompile: error: ")]
    assert code == 2, error[-4000:]
    assert len(lines) == 1, error[-4000:]
    for part in parts:
        assert part in lines[0]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.e2e
def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    _assert_one_line(_serve(tmp_path / "nowhere"), str(tmp_path / "nowhere"), "no such folder")


@pytest.mark.e2e
def test_an_unknown_hub_name_is_named(tmp_path: Path) -> None:
    _assert_one_line(_serve("nobody/no-such-model"), "nobody/no-such-model")


@pytest.mark.e2e
def test_an_unsupported_architecture_is_named_with_the_supported_ones(gpt2: Path) -> None:
    _assert_one_line(
        _serve(gpt2, "--skip-tokenizer-init"), "GPT2LMHeadModel", "LlamaForCausalLM", "without --compilation-config"
    )


@pytest.mark.e2e
def test_a_port_in_use_is_named(tiny_llama: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = _serve(tiny_llama, "--host", "127.0.0.1", "--port", str(port))
    _assert_one_line(result, f"port {port}", "in use", "--port")


@pytest.mark.e2e
def test_an_unknown_key_in_the_configuration_file_is_named_with_its_neighbour(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text("[kv8]\nenable = true\n")
    result = _serve(tiny_llama, "--skip-tokenizer-init", KVCOMPILE_CONFIG=str(file))
    _assert_one_line(result, "kv8.enable", "kv.toml", "kv8.enabled")


@pytest.mark.e2e
def test_a_value_out_of_range_is_named_with_its_range(tiny_llama: Path) -> None:
    result = _serve(tiny_llama, "--skip-tokenizer-init", KVCOMPILE_OFFLOAD_LAZY_GPU_FREE_TRIGGER="1.5")
    _assert_one_line(result, "offload.lazy_gpu_free_trigger", "1.5", "0", "1")


@pytest.mark.e2e
def test_too_little_memory_names_what_is_needed_and_what_would_fit(tiny_llama: Path) -> None:
    result = _serve(
        tiny_llama, "--skip-tokenizer-init", "--load-format", "dummy", "--kv-cache-memory-bytes", str(100 * 2**10)
    )
    _assert_one_line(result, "too little memory", "512 tokens", "--max-model-len")
