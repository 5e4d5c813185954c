"""`scripts/serve.sh` with the real server behind it: settings take effect, it answers, and SIGTERM ends it."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from kvcompile.tools.server import VllmServer, free_port, group_alive
from tests.served_trace import random_llama

ROOT = Path(__file__).parents[2]
BUDGET, NEW = 256, 4
ARGUMENTS = ("--enforce-eager", "-cc.mode=0", "--skip-tokenizer-init", "--dtype", "float32")


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_model_is_served_as_the_environment_says_until_a_signal(tiny_llama: Path, tmp_path: Path) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "a model")
    offload = json.loads((ROOT / "config/offload.json").read_text())
    offload["kv_connector_extra_config"]["cpu_bytes_to_use"] = 8 << 20
    (tmp_path / "an offload.json").write_text(json.dumps(offload))
    port = free_port()
    settings = {
        "VLLM": str(Path(sys.executable).with_name("vllm")),
        "MODEL": str(model),
        "MAX_MODEL_LEN": "500",
        "MAX_NUM_BATCHED_TOKENS": "512",
        "MAX_NUM_SEQS": "4",
        "GPU_MEMORY_UTILIZATION": "0.3",
        "SERVER_HOST": "127.0.0.1",
        "PORT": str(port),
        "VLLM_ANDPRO_BUDGET_TOKENS": str(BUDGET),
        "OFFLOAD": "1",
        "OFFLOAD_CONFIG": str(tmp_path / "an offload.json"),
    }
    server = VllmServer(model, log=tmp_path / "log", port=port, environment=settings)
    server.command = [str(ROOT / "scripts/serve.sh"), *ARGUMENTS, "--kv-cache-memory-bytes", str(32 << 20)]
    with server:
        server.wait_until_ready(600)
        sampling = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(range(3, 403)), "sampling_params": sampling}
        answer = server.post("/inference/v1/generate", body)["choices"][0]["token_ids"]
        assert len(answer) == NEW

        process = server._running()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        deadline = time.monotonic() + 60  # its own processes end by themselves, a little later
        while group_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_alive(process.pid)
    active = (tmp_path / "log").read_text().split(" active: ")[1].split("not active: ")[0]
    assert "prune (" in active and "offload (8388608 bytes of host memory" in active
