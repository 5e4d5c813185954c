"""A real engine for a tool, in a process of its own: it leaves one that no second engine can be started in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError

_CHILD = """
import importlib, json, sys
module, function, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))
"""


def call(function: Callable[..., Any], model: str, *arguments: Any) -> Any:
    """What `function(model, *arguments)` returns, in a new process; arguments and result as JSON has them.

    Raises UsageError, with the last line that the engine wrote, if it failed.
    """
    given = json.dumps([model, *arguments])
    command = [sys.executable, "-c", _CHILD, function.__module__, function.__name__, given]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"--engine {model}: the engine failed: {last}; look at it with `vllm serve {model}`")
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextmanager
def scratch(name: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder for the time of a run; with logs of engines in it (*.log), it stays if the run does not end well."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvcompile-{name}-", dir=parent))
    try:
        yield folder
    except BaseException:
        if not any(folder.glob("*.log")):
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def environment() -> dict[str, str]:
    """In which an engine is one process, and asks no network for a model."""
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def model_arguments(model: str | Path) -> dict[str, Any]:
    """Of LLM, for a folder with a checkpoint, or with a config.json alone: then weights are made up.

    The share of the GPU's memory is only checked, where the size of the cache is given.
    """
    has_weights = any(Path(model).glob("*.safetensors"))
    return {"load_format": "auto" if has_weights else "dummy", "gpu_memory_utilization": 0.3, "block_size": 16}
