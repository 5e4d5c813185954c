"""`vllm serve` with two engines behind two front ends: /metrics adds up what all of them count, engine by engine."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcompile.tools.server import VllmServer
from tests.served_trace import random_llama

LENGTHS, NEW, BUDGET = (40, 100, 149, 201, 256, 300, 333, 401), 4, 64
OPTIONS = {"prune": {"enabled": True, "budget_tokens": BUDGET, "window_tokens": 16}}
ARGUMENTS = (
    *("--compilation-config", json.dumps({"kvcompile": OPTIONS, "mode": 0}), "--enforce-eager"),
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "16", "--max-model-len", "512"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", str(32 << 20)),
    *("--data-parallel-size", "2", "--api-server-count", "2"),
)


def sums(server: VllmServer) -> tuple[Counter[str], Counter[str]]:
    """What /metrics has of kvcompile's: per name and own label over all engines; per engine: requests that ended."""
    total, ended = Counter(), Counter()
    for name, labels, value in re.findall(r"^vllm:kvcompile_(\w+)\{(.*)\} (\S+)$", server.metrics(), re.MULTILINE):
        given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        engine, own = given.pop("engine"), [v for k, v in given.items() if k != "model_name"]
        total[" ".join([name, *own])] += float(value)
        if name == "request_resident_kv_tokens_count":
            ended[engine] += float(value)
    return total, ended


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_metrics_of_two_engines_behind_two_front_ends_add_up(tiny_llama: Path, tmp_path: Path) -> None:
    model = random_llama(tiny_llama / "config.json", tmp_path / "model")

    def ask(server: VllmServer, length: int, **more: object) -> int:
        sampling = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "detokenize": False, **more}
        body = {"token_ids": list(range(3, 3 + length)), "sampling_params": sampling}
        return len(server.post("/inference/v1/generate", body)["choices"][0]["token_ids"])

    # By itself vLLM wants a core for each engine and one more.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with VllmServer(model, ARGUMENTS, log=tmp_path / "log", environment=unbound) as server:
        server.wait_until_ready(600)
        start, _ = sums(server)
        assert start["pruned_tokens_total two_phase"] == 0 and "prune_refusals_total prompt_logprobs" in start
        with ThreadPoolExecutor(8) as pool:  # each over a connection of its own, which one of the front ends takes
            lengths = LENGTHS * 2
            assert set(pool.map(lambda length: ask(server, length), lengths)) == {NEW}
            closely = list(pool.map(lambda length: ask(server, length, prompt_logprobs=0), LENGTHS[:4]))
            assert closely == [NEW] * 4
        total, ended = sums(server)
    released = [max(0, (length - BUDGET) // 16) for length in lengths]
    assert total["pruned_tokens_total two_phase"] + total["pruned_tokens_total inline"] == 16 * sum(released)
    assert total["prune_refusals_total prompt_logprobs"] == 3
    assert total["prune_refusals_total not_acknowledged"] == 0
    held = sum(lengths) - 16 * sum(released) + sum(LENGTHS[:4]) + 20 * (NEW - 1)
    assert total["request_resident_kv_tokens_sum"] == held
    assert set(ended) == {"0", "1"} and sum(ended.values()) == 20 and min(ended.values()) > 0
    log = (tmp_path / "log").read_text()
    assert 1 <= len(re.findall("a request is not pruned: it asks for the log-probabilities", log)) <= 2  # engines
