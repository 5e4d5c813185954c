"""An engine of `kvcompile bench serve` that answers at once, and notes what it was asked."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcompile.config import LM_HEAD_INT8_ROWS, UsageError
from kvcompile.tools import serve_gpus, serve_memory, serve_run
from kvcompile.tools.serve_engine import FACTS
from kvcompile.tools.serve_systems import SYSTEMS

HOPPER = ((9, 0), 140 << 30)


class Fake:
    """An engine that answers at once and notes what it was asked, and when."""

    asked: list[tuple[str, Any]] = []
    arguments: dict[str, dict[str, Any]] = {}
    placed: dict[str, tuple[str, Any]] = {}
    facts_of: dict[str, Any] = {}
    found_of: dict[str, Any] = {}
    meet: threading.Barrier | None = None  # where engines wait for each other before they answer
    fails: str = ""

    def __init__(self, name: str, model: Path, arguments: dict[str, Any], log: Path, gpu: str, cores: Any) -> None:
        self.name, self.arguments[name], self.placed[name] = name, arguments, (gpu, cores)
        assert (model / "config.json").is_file() and arguments["load_format"] == "dummy"
        self.config = json.loads((model / "config.json").read_text())
        self.asked.append((name, "start"))

    def facts(self) -> dict[str, Any]:
        system = SYSTEMS[self.name]
        own = {
            **dict.fromkeys(FACTS, 0),
            "weight_bytes": serve_memory.weight_bytes(
                self.config, system.weights, self.arguments[self.name]["max_num_seqs"] <= LM_HEAD_INT8_ROWS
            ),
            "blocks": self.arguments[self.name]["kv_cache_memory_bytes"]
            // serve_memory.block_bytes(self.config, system.cache),
        }
        return {**own, **system.expected, **self.facts_of}

    def run(self, prompt: int, output: int, requests: int, seed: int) -> dict[str, Any]:
        if self.meet:
            self.meet.wait(timeout=30)
        if self.fails == self.name:
            raise UsageError(f"{self.name}: the engine ended: out of luck")
        self.asked.append((self.name, (prompt, output, requests, seed)))
        found = {
            "seconds": 2.0 if self.name == "vllm-bf16" else 1.0,
            "ttft": [0.1, 0.2, 0.3, 0.4][:requests],
            "tpot": [0.01] * requests,
            "preemptions": seed,
            "peak_blocks": 10 * requests,
            "peak_running": requests,
        }
        if SYSTEMS[self.name].expected["prunes"]:
            pruned = {"pruned_tokens": 0, "inline_prompts": 0, "not_pruned": 0, "resident_tokens": 7.0}
            found |= pruned | self.found_of
        return found

    def close(self) -> None:
        self.asked.append((self.name, "close"))


def install(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """Every engine is a Fake that has been asked nothing yet, on a host with two GPUs and five cores."""
    Fake.asked, Fake.arguments, Fake.placed, Fake.facts_of, Fake.found_of = [], {}, {}, {}, {}
    Fake.meet, Fake.fails = None, ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(serve_gpus, "found", lambda: [HOPPER, HOPPER])
    monkeypatch.setattr(serve_gpus.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(serve_run, "Served", Fake)
    return Fake
