"""Time to the first token of one prompt in a stock vLLM engine: what the cost of pruning that prompt is measured by."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.config import UsageError
from kvcompile.tools import engine_process, model_shapes
from kvcompile.tools.checkpoint_config import read_json
from kvcompile.tools.serve_engine import Served

_WARM_UP = 2  # prompts of each length
_SLACK_BYTES = 256 << 20  # of the cache, for its null block and what vLLM rounds


class Shape(NamedTuple):
    """Of a model's attention."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int


def shape_of(config: dict[str, Any]) -> Shape:
    """From a config.json. Raises UsageError for one without it."""
    try:
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"--prefill: config.json gives no layers and heads ({error!r}); correct it") from None
    return Shape(layers, heads, config.get("num_key_value_heads") or heads, head_size)


def first_token_us(model: str, expected: Shape, tokens: Iterable[int], runs: int) -> dict[int, list[float]]:
    """Microseconds to the first token of a prompt of each of the lengths, one value per run, one prompt at a time.

    model: a folder or the name of a shape, as `model_shapes.folder_of` takes it, in bf16, with made-up weights where
    there are none, and vLLM's own settings. expected: the shape that is pruned, which has to be the model's.

    Raises UsageError for another shape, and where the engine does not run, with the place of its log.
    """
    with engine_process.scratch("prefill") as folder:
        return _first_token_us(model, expected, sorted(set(tokens)), runs, folder)


def _first_token_us(model: str, expected: Shape, lengths: list[int], runs: int, folder: Path) -> dict[int, list[float]]:
    model_folder = model_shapes.folder_of(model, folder)
    shape = shape_of(read_json(model_folder / "config.json"))
    if shape != expected:
        given, needed = (", ".join(f"{name} {n}" for name, n in x._asdict().items()) for x in (expected, shape))
        raise UsageError(f"--prefill {model} has {needed}; what is pruned has {given}; give both the same")
    cache = 2 * 2 * shape.layers * shape.kv_heads * shape.head_size * (lengths[-1] + 1)  # bf16 keys and values
    arguments = {
        **engine_process.model_arguments(model_folder),
        "dtype": "bfloat16",
        "max_model_len": lengths[-1] + 1,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": cache + _SLACK_BYTES,
    }
    served = Served(f"prefill of {model}", model_folder, arguments, folder / "engine.log")
    try:
        if served.facts()["kvcompile"]:
            raise UsageError(f"--prefill {model}: kvcompile is active in the engine, which has to be stock vLLM")
        return {length: _runs(served, length, runs) for length in lengths}
    finally:
        served.close()


def _runs(served: Served, length: int, runs: int) -> list[float]:
    times = []
    for seed in range(_WARM_UP + runs):
        (seconds,) = served.run(length, 1, 1, seed)["ttft"]
        times.append(1e6 * seconds)
    return times[_WARM_UP:]


def shares(layer_us: list[float], layers: int, prefill_us: list[float]) -> list[float]:
    """Percent of the median prefill that pruning all layers takes, one value per run of pruning."""
    return [100 * layers * us / statistics.median(prefill_us) for us in layer_us]
