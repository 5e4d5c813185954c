"""A trace served by a real engine whose preempted requests are saved on the host, with its books checked all along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from kvcompile.schedule.trace import Arrival
from tests.engine import run_python
from tests.served_trace import FIELDS

# Arguments, as JSON: the model; kvcompile's options; fields of LLM; what to serve, one after the other: a trace and its
# aborts; and code to run on the engine before. Prints one JSON line for each trace.
SCRIPT = """
    import json, sys
    from kvcompile.integrations.vllm.integrity import check_integrity
    from kvcompile.integrations.vllm.replay_engine import Engine
    from kvcompile.schedule.trace import Arrival

    model, options, fields, given, code = json.loads(sys.argv[1])
    engine = Engine(model, options=options, **fields)
    scheduler = engine.scheduler
    control = getattr(scheduler, "offload", None)
    exec(code)
    update = type(scheduler).update_from_output
    preempt, freed = scheduler._preempt_request, 0

    def preempted(request, timestamp):
        global freed
        freed += len(scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        preempt(request, timestamp)

    def updated(self, *args):
        result = update(self, *args)
        check_integrity(self)
        return result

    scheduler._preempt_request, type(scheduler).update_from_output = preempted, updated
    for trace, aborts in given:
        freed = 0
        restores = control.counters.restores if control else 0
        lost = control.counters.lost_pages if control else 0
        run = engine.serve([Arrival(*each) for each in trace], aborts={int(index): n for index, n in aborts.items()})
        said = {
            "scheduler": type(scheduler).__name__,
            "asynchronous": engine.asynchronous,
            "tokens": run.tokens,
            "preemptions": run.outcome.preemptions,
            "recomputed_tokens": run.outcome.recomputed_tokens,
            "aborted": [index for index, life in enumerate(run.outcome.lives) if life.aborted],
            "left_blocks": run.lost_blocks,
            "freed_blocks": freed,
            "lost_blocks": control.counters.lost_pages - lost if control else freed,
            "restores": control.counters.restores - restores if control else 0,
            "fallbacks": {r.name: n for r, n in control.counters.fallbacks.items()} if control else {},
            "known": len(control.books.known()) if control else 0,
            "pool_bytes": worker_pool() if control else 0,
        }
        print("SERVED", json.dumps(said), flush=True)
    engine.shutdown()
"""
SETUP = """
def worker_pool():
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    copies = get_kv_transfer_group()._worker._copies
    return copies.nbytes if copies else 0
"""


def serve(
    model: Path,
    options: Mapping[str, Any],
    given: Sequence[tuple[Sequence[Arrival], Mapping[int, int]]],
    *,
    blocks: int,
    code: str = "",
    environment: Mapping[str, str] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Serve each trace with its aborts in `given` on one engine. `code` runs in the engine's process before."""
    fields = {
        "dtype": "float32",
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
        "block_size": 16,
        "enforce_eager": True,
        **FIELDS,
        **fields,
    }
    traces = [([astuple(arrival) for arrival in trace], dict(aborts)) for trace, aborts in given]
    wanted = json.dumps([str(model), options, fields, traces, SETUP + code])
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})}
    log = run_python(SCRIPT, wanted, environment=variables, timeout_s=1200)
    lines = [line.removeprefix("SERVED ") for line in log.splitlines() if line.startswith("SERVED ")]
    assert len(lines) == len(given), log[-6000:]
    return [json.loads(line) for line in lines]
