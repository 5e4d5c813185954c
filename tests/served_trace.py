"""A trace served by a real engine in a process of its own: which scheduler it had, what it did, and every token."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvcompile import llama
from kvcompile.schedule.trace import Arrival
from tests.engine import run_python

# Arguments, as JSON: the model; kvcompile's options or None for stock vLLM; fields of LLM; and what to serve, one after
# the other: a trace and the aborts of it. Prints one JSON line for each.
SCRIPT = """
    import json, sys
    from kvcompile.integrations.vllm.replay_engine import Engine
    from kvcompile.schedule.trace import Arrival

    model, options, fields, given = json.loads(sys.argv[1])
    engine = Engine(model, options=options, **fields)
    for trace, aborts in given:
        run = engine.serve([Arrival(*each) for each in trace], aborts={int(index): n for index, n in aborts.items()})
        said = {
            "scheduler": type(engine.scheduler).__name__,
            "asynchronous": engine.asynchronous,
            "tokens": run.tokens,
            "steps": len(run.timed),
            "preemptions": run.outcome.preemptions,
            "recomputed_tokens": run.outcome.recomputed_tokens,
            "aborted": [index for index, life in enumerate(run.outcome.lives) if life.aborted],
            "lost_blocks": run.lost_blocks,
        }
        print("SERVED", json.dumps(said), flush=True)
    engine.shutdown()
"""
BLOCKS = 70
FIELDS = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256}
OPTIONS: dict[str, dict[str, Any] | None] = {"stock": None, "kvcompile": {"kv8": {"enabled": False}}}
# Of the scheduler's classes, those of stock vLLM and kvcompile, synchronous and asynchronous.
CLASSES = {
    ("stock", False): "Scheduler",
    ("stock", True): "AsyncScheduler",
    ("kvcompile", False): "LengthAwareScheduler",
    ("kvcompile", True): "LengthAwareAsyncScheduler",
}


@dataclass(frozen=True)
class Served:
    """`steps`: that computed something. `aborted`: whose client went away before its answer was whole."""

    scheduler: str
    asynchronous: bool
    tokens: list[list[int]]
    steps: int
    preemptions: int
    recomputed_tokens: int
    aborted: list[int]
    lost_blocks: int


def mixed(requests: int) -> list[Arrival]:
    """Requests that arrive together and, where 16 run at a time, grow to three times what the pool holds."""
    rng = random.Random(0)
    lengths = [(rng.randint(8, 120), rng.randint(16, 100)) for _ in range(requests)]
    return [Arrival(0.0, prompt, output, output) for prompt, output in lengths]


def random_aborts(requests: int, calls: int) -> dict[int, int]:
    """The clients of every other request go away, each after a call of the engine of these, drawn at random."""
    rng = random.Random(1)
    return {index: rng.randint(1, calls) for index in range(0, requests, 2)}


def random_llama(configuration: Path, folder: Path) -> Path:
    """A checkpoint in `folder` by this config.json, float32, with weights that make a token depend on all before it."""
    config = {**json.loads(configuration.read_text()), "torch_dtype": "float32"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    # Every linear keeps the size of what it is given, so that attention prefers some tokens, and answers differ.
    weights = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        for name, shape, _ in llama.expected(config, "config.json")
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def serve(
    model: Path,
    system: str,
    given: Sequence[tuple[Sequence[Arrival], Mapping[int, int]]],
    *,
    environment: dict[str, str] | None = None,
    **fields: Any,
) -> list[Served]:
    """Serve each trace with its aborts in `given`, one after the other, on one engine of this system."""
    fields = {
        "dtype": "float32",
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
        "block_size": 16,
        **FIELDS,
        **fields,
    }
    traces = [([astuple(arrival) for arrival in trace], dict(aborts)) for trace, aborts in given]
    wanted = json.dumps([str(model), OPTIONS[system], fields, traces])
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})}
    log = run_python(SCRIPT, wanted, environment=variables)
    lines = [line.removeprefix("SERVED ") for line in log.splitlines() if line.startswith("SERVED ")]
    assert len(lines) == len(given), log[-6000:]
    return [Served(**json.loads(line)) for line in lines]


def replayed(system: str, trace: Sequence[Arrival], *, asynchronous: bool) -> dict[str, int]:
    """What a replay says of the same trace over the same pool."""
    from kvcompile.integrations.vllm.replay_systems import replay
    from kvcompile.schedule.trace import H200_LLAMA_8B

    name = {"stock": "vllm-fcfs", "kvcompile": "kvcompile"}[system]
    outcome = replay(name, trace, BLOCKS, H200_LLAMA_8B, asynchronous=asynchronous, **FIELDS)
    return {
        "steps": len(outcome.blocks_used) - outcome.empty_steps,
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed_tokens,
    }


def assert_others_are_unchanged(whole: Served, aborted: Served, aborts: Mapping[int, int]) -> None:
    """With these aborts, all others have the same tokens, and the aborted ones the first of theirs."""
    assert set(aborted.aborted) <= set(aborts)
    for index, (before, after) in enumerate(zip(whole.tokens, aborted.tokens, strict=True)):
        if index in aborted.aborted:
            assert len(after) < len(before) and after == before[: len(after)], index
        else:
            assert after == before, index
