"""Hold the simulation to a real engine: the same small mix, scheduled synchronously, must make the same steps."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival
from kvcompile.tools import engine_process, record
from kvcompile.tools.checkpoint_config import config_file

# Blocks for a third of what the requests grow to, so that vLLM's own scheduler preempts.
BLOCKS = 70
FIELDS = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256}
SYSTEMS = {"vllm-fcfs": None, "kvcompile": {"kv8": {"enabled": False}}}


def small_mix() -> list[Arrival]:
    """24 requests that arrive at once; the engine serves each to its limit, which is therefore what it produces."""
    rng = random.Random(0)
    lengths = [(rng.randint(8, 120), rng.randint(16, 100)) for _ in range(24)]
    return [Arrival(0.0, prompt, output, output) for prompt, output in lengths]


def check(model: str) -> tuple[list[dict[str, Any]], bool]:
    """Rows of both systems, simulated and real, and whether the simulation made the engine's steps, with a table.

    model: folder of a checkpoint; without weights there, they are made up.
    """
    config_file(model, "--engine ")
    table = Table(title="24 requests, 70 blocks, synchronous: simulated and real engine", title_justify="left")
    for heading in ("system", "preempted", "steps", "tokens like stock's"):
        table.add_column(heading)
    rows, agrees, tokens = [], True, {}
    for system in SYSTEMS:
        real, simulated = engine_process.call(served, model, system), simulate(system)
        tokens[system] = real["tokens"]
        same = tokens[system] == tokens["vllm-fcfs"]
        agrees &= same and all(real[name] == simulated[name] for name in simulated)
        for where, found in (("simulated", simulated), ("engine", real)):
            for metric, unit in (("preemptions", "requests"), ("steps", "steps")):
                rows.append(record.row(f"24 at once, {where}", system, metric, unit, [found[metric]]))
        pairs = (f"{simulated[name]} simulated, {real[name]} real" for name in ("preemptions", "steps"))
        table.add_row(system, *pairs, "yes" if same else "NO")
    record.console().print(table)
    return rows, agrees


def simulate(system: str) -> dict[str, int]:
    """Preemptions and steps of the mix with a simulated worker."""
    from kvcompile.integrations.vllm.replay_systems import replay

    outcome = replay(system, small_mix(), BLOCKS, H200_LLAMA_8B, asynchronous=False, **FIELDS)
    # The last call of schedule() finds nothing left to do and only says who is finished.
    return {"preemptions": outcome.preemptions, "steps": len(outcome.blocks_used) - outcome.empty_steps}


def served(model: str, system: str) -> dict[str, Any]:
    """The same of a real engine in this process, and the output tokens of each request."""
    fields: dict[str, Any] = engine_process.model_arguments(model)
    if record.gpu():
        # Other batches round otherwise, so tokens are compared in full precision: Triton's attention takes it, and by
        # itself multiplies with 10 bits of it.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        fields |= {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
    if fields["load_format"] == "dummy":
        # What is scheduled does not depend on the depth, and made-up weights are worth no waiting.
        layers = json.loads(Path(model, "config.json").read_text()).get("num_hidden_layers", 2)
        fields["hf_overrides"] = {"num_hidden_layers": min(2, layers)}
    from kvcompile.integrations.vllm.replay_engine import Engine

    engine = Engine(
        model,
        options=SYSTEMS[system],
        num_gpu_blocks_override=BLOCKS,
        kv_cache_memory_bytes=256 << 20,
        async_scheduling=False,
        enforce_eager=True,
        **FIELDS,
        **fields,
    )
    run = engine.serve(small_mix())
    engine.shutdown()
    return {"preemptions": run.outcome.preemptions, "steps": len(run.timed), "tokens": run.tokens}
