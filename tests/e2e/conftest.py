"""End-to-end tests: real processes, a real model, vLLM's CPU build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SERVER_ARGUMENTS = ("--max-model-len", "6144", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(320 * 2**20))


@pytest.fixture(scope="session")
def compile_caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with compile caches of this test session: cold at first, shared by the tests afterwards."""
    root = tmp_path_factory.mktemp("compile")
    return {"VLLM_CACHE_ROOT": str(root / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor")}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer LlamaForCausalLM configuration without weights, for `load_format="dummy"`."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_python(
    script: str, *arguments: str | Path, environment: dict[str, str] | None = None, timeout_s: float = 600
) -> str:
    """Run `script` in a new interpreter and return its output, standard error included; fails the test on an error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
