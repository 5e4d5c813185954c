"""The process of an engine that serves what a benchmark asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.config import UsageError
from kvcompile.tools import serve_engine, serve_memory
from kvcompile.tools.serve_engine import Served


def test_an_engine_that_ends_while_it_is_idle_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, script = subprocess.Popen, "import sys; sys.exit('MemoryError: killed')"
    monkeypatch.setattr(
        serve_engine.subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", script], **options)
    )
    engine = Served("kvcompile", tmp_path, {}, tmp_path / "log")
    engine._process.wait()
    with pytest.raises(UsageError, match="^kvcompile: the engine ended: MemoryError: killed; its log is "):
        engine.run(8, 5, 4, 0)


@pytest.mark.timeout(600)
def test_the_child_serves_what_it_is_asked_for_and_a_broken_one_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 192, "kv_cache_memory_bytes": 64 << 20}
    prunes = {"kv8": {"enabled": True}, "prune": {"enabled": True, "budget_tokens": 64}}
    ours = {
        "compilation_config": "kvcompile",
        "additional_config": {"kvcompile": prunes},
        "quantization": "kvcompile_w4a8",
        "enable_prefix_caching": False,
        "block_size": 16,
    }
    engine = Served(
        "kvcompile",
        tiny_llama,
        {**arguments, **ours, "max_num_seqs": 4},
        tmp_path / "log",
        cores=[min(os.sched_getaffinity(0))],
    )
    broken = Served("vllm-bf16", tiny_llama, arguments, tmp_path / "broken.log", cores=[1 << 20])
    try:
        facts = engine.facts()
        config = json.loads((tiny_llama / "config.json").read_text())
        counted = serve_memory.weight_bytes(config, "w4a8")
        assert facts["weight_bytes"] == pytest.approx(counted, rel=0.001)
        assert facts["blocks"] == (64 << 20) // serve_memory.block_bytes(config, "int8_per_token_head")
        assert (facts["linears"], facts["attention"], facts["prunes"]) == ("uint8", "CUSTOM", True)
        assert facts["cores"] == 1
        for seed in (1, 2):  # what is counted belongs to a run alone
            run = engine.run(160, 6, 3, seed)
            assert len(run["ttft"]) == len(run["tpot"]) == 3 and run["preemptions"] == 0
            assert 0 < max(run["ttft"]) <= run["seconds"]
            # Of 160 tokens in 10 blocks 6 are released; what is written inline is in 4 blocks, the answer in one more.
            assert (run["pruned_tokens"], run["inline_prompts"], run["not_pruned"]) == (3 * 96, 3, 0)
            assert (run["peak_running"], run["peak_blocks"], run["resident_tokens"]) == (3, 15, 160 - 96 + 5)
        with pytest.raises(UsageError, match=r"^vllm-bf16: the engine ended: .*Error.*; its log is .*broken.log$"):
            broken.facts()
    finally:
        engine.close()
        broken.close()
